"""The times that a connection is given: for a head, for the rest of a body, between requests, and for its end."""

from __future__ import annotations

from asyncio import TimerHandle


class Timers:
    """The timers of one connection that run, each None while it does not."""

    __slots__ = ("abort", "head", "pace", "rest")

    def __init__(self) -> None:
        self.head: TimerHandle | None = None
        self.rest: TimerHandle | None = None
        self.pace: TimerHandle | None = None
        self.abort: TimerHandle | None = None

    def end_head(self) -> None:
        """The head is complete."""
        if self.head is not None:
            self.head.cancel()
            self.head = None

    def end_rest(self) -> None:
        """The rest of the body is there."""
        if self.rest is not None:
            self.rest.cancel()
            self.rest = None

    def cancel(self) -> None:
        """The connection is lost: nothing of it is waited for any more."""
        for timer in (self.head, self.rest, self.pace, self.abort):
            if timer is not None:
                timer.cancel()
        self.head = self.rest = self.pace = self.abort = None
