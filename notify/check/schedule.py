"""The schedule of checks: exponential back-off with jitter, and a slow rate for parked transactions."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckSchedule:
    """Times in seconds. Only answered checks count as attempts (RocketMQ issue 8311)."""

    attempts: int = 15
    backoff: float = 5.0
    backoff_max: float = 60.0
    answer_within: float = 10.0
    parked_every: float = 600.0

    def delay_us(self, answered: int, parked: bool, jitter: random.Random) -> int:
        """Microseconds until the next check after `answered` answers; lengthened by up to a fifth at random."""
        if parked:
            seconds = self.parked_every
        else:
            seconds = min(self.backoff_max, self.backoff * 2.0 ** min(max(answered - 1, 0), 30))
        return round(seconds * (1 + 0.2 * jitter.random()) * 1_000_000)
