"""Clocks that are passed as arguments, so that a test or a simulation can control the time."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Returns the time in microseconds since 1970."""


def wall_clock() -> int:
    return time.time_ns() // 1000


def boot_clock() -> int:
    """Microseconds since this machine started. This clock is never set, and continues while the machine sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1000


MOST_AHEAD_US = 24 * 3600 * 1_000_000
"""If the followed clock is set back by more than this, a SteadyClock is set back too."""


class SteadyClock:
    """A clock that follows another clock, but neither goes back nor stops when the other clock is set back.

    It runs at half speed then, until the other clock has caught up. Leases, retries and rates therefore take at most
    twice as long, and not as many hours longer as the clock was set back. If catching up would take days, because the
    clock was completely wrong before, this clock goes back too.
    """

    __slots__ = ("_followed", "_last", "_steady_ns")

    def __init__(self, followed: Clock = wall_clock, steady_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`steady_ns`: a clock in nanoseconds that is never set."""
        self._followed = followed
        self._steady_ns = steady_ns
        self._last = (0, 0)
        """A time of this clock, and the steady clock's time at the same moment."""

    def __call__(self) -> int:
        now_us, steady_ns = self._followed(), self._steady_ns()
        last_us, last_steady_ns = self._last
        least_us = last_us + (steady_ns - last_steady_ns) // 2000
        if now_us < least_us < now_us + MOST_AHEAD_US:
            return least_us
        self._last = now_us, steady_ns
        return now_us

    def go_on_from(self, then_us: int) -> None:
        """Show this time now, if the followed clock is behind it: what wrote at that time had this clock's task.

        A time that is further ahead than `MOST_AHEAD_US` is not taken over, as if the other clock had been set back.
        """
        now_us = self()
        if now_us < then_us < now_us + MOST_AHEAD_US:
            self._last = then_us, self._steady_ns()


steady_clock = SteadyClock()
"""The time of day in this process."""
