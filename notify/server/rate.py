"""Rate limits: a token bucket that fills at a steady rate and holds the tokens of one second."""

from __future__ import annotations

from notify.errors import Backpressure


class TokenBucket:
    """Allows `per_second` messages a second, with bursts of one second's messages. The caller gives the time."""

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
