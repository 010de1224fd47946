"""The time of day as an argument, so that a test or a simulation can drive it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Microseconds since 1970, by the wall."""


def wall_clock() -> int:
    return time.time_ns() // 1000
