"""A connection's timers: for a head, for the rest of a body, between requests, for unread answers, and for its end."""

from __future__ import annotations

from asyncio import TimerHandle


class Timers:
    """The timers of one connection; each is None while it does not run."""

    __slots__ = ("abort", "head", "pace", "rest", "write")

    def __init__(self) -> None:
        self.head: TimerHandle | None = None
        self.rest: TimerHandle | None = None
        self.pace: TimerHandle | None = None
        self.write: TimerHandle | None = None
        self.abort: TimerHandle | None = None

    def end_head(self) -> None:
        """Stop the timer of a head, which is complete."""
        if self.head is not None:
            self.head.cancel()
            self.head = None

    def end_rest(self) -> None:
        """Stop the timer of the rest of a body, which is complete."""
        if self.rest is not None:
            self.rest.cancel()
            self.rest = None

    def cancel(self) -> None:
        """Stop all timers, because the connection is lost."""
        for timer in (self.head, self.rest, self.pace, self.write, self.abort):
            if timer is not None:
                timer.cancel()
        self.head = self.rest = self.pace = self.write = self.abort = None
