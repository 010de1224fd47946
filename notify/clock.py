"""The time of day as an argument, so that a test or a simulation can drive it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Microseconds since 1970, by the wall."""


def wall_clock() -> int:
    return time.time_ns() // 1000


def boot_clock() -> int:
    """Microseconds since this machine started: nobody sets this clock, and it goes on while the machine sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1000


MOST_AHEAD_US = 24 * 3600 * 1_000_000


class SteadyClock:
    """A clock that follows another one, and neither goes back nor stands still where that is set back.

    It goes at half its speed then, until the other one has caught up: leases, retries and rates that are under way take
    twice as long at most, and not as many hours longer as the clock was set back. Where that would take days, because
    the clock was far from any right time before, it goes back, too.
    """

    __slots__ = ("_followed", "_seen", "_steady_ns")

    def __init__(self, followed: Clock = wall_clock, steady_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`steady_ns`: nanoseconds by a clock that nobody sets."""
        self._followed = followed
        self._steady_ns = steady_ns
        self._seen = (0, 0)
        """A time of this clock, and that of the steady one then."""

    def __call__(self) -> int:
        now_us, steady_ns = self._followed(), self._steady_ns()
        time_us, at_ns = self._seen
        least_us = time_us + (steady_ns - at_ns) // 2000
        if now_us < least_us < now_us + MOST_AHEAD_US:
            return least_us
        self._seen = now_us, steady_ns
        return now_us


steady_clock = SteadyClock()
"""The time of day in this process."""
