"""Rate limits: a token bucket, and a share of the server's time for work that can wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from notify.errors import Backpressure

MOST_PAUSE_SECONDS = 1.0
"""The longest pause before a turn of work that has a share of the time."""


class TokenBucket:
    """A bucket of tokens that fills at a steady rate, and holds those of one second.

    Allows `per_second` messages a second, with bursts of one second's messages. The caller gives the time."""

    __slots__ = ("_at_us", "_tokens", "per_second")

    def __init__(self, per_second: float, now_us: int) -> None:
        self.per_second = per_second
        self._tokens = max(1.0, per_second)
        self._at_us = now_us

    def _fill(self, now_us: int) -> None:
        if now_us > self._at_us:
            gained = (now_us - self._at_us) * self.per_second / 1e6
            self._tokens = min(max(1.0, self.per_second), self._tokens + gained)
        self._at_us = now_us  # also if the clock was set back: else the bucket would not fill until it has caught up

    def available(self, now_us: int) -> int:
        """How many messages may be taken now."""
        self._fill(now_us)
        return max(0, int(self._tokens))

    def take(self, count: int, now_us: int) -> None:
        """Take `count` messages, also more than are available: the bucket then fills from below 0."""
        self._fill(now_us)
        self._tokens -= count

    def admit(self, now_us: int, what: str) -> None:
        """Take one message. Raises Backpressure if none is available; its text is `what` and when to send again."""
        if not self.available(now_us):
            seconds = (self.refilled_us(now_us) - now_us) / 1e6
            raise Backpressure(f"{what}; send again in {seconds:.3f} s", "rate_limited", seconds)
        self.take(1, now_us)

    def refilled_us(self, now_us: int) -> int:
        """When the next message may be taken, in microseconds."""
        self._fill(now_us)
        return now_us + max(0, round((1 - self._tokens) / self.per_second * 1e6)) + 1


class ShareOfTime:
    """Gives work of one kind its turns, one after the other, so that it takes at most a share of the server's time.

    A turn begins with the pause that the turns before it owe: the caller whose turn ends can answer at once.
    """

    def __init__(self, share: float, monotonic: Callable[[], float] = time.perf_counter) -> None:
        """`monotonic`: a clock in seconds."""
        self._share = share
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._free_at = 0.0
        self._waited = 0.0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the other turns and for the pause, which lasts at most MOST_PAUSE_SECONDS."""
        async with self._lock:
            await asyncio.sleep(min(MOST_PAUSE_SECONDS, max(0.0, self._free_at - self._monotonic())))
            self._waited, began = 0.0, self._monotonic()
            try:
                yield
            finally:
                ended = self._monotonic()
                self._free_at = ended + max(0.0, ended - began - self._waited) * (1 / self._share - 1)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time within is not the turn's work, such as the sync of a frame that others have filled."""
        began = self._monotonic()
        try:
            yield
        finally:
            self._waited += self._monotonic() - began
