"""Backoff: the waits between repeated attempts."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""Not the functions of `random`, whose sequence belongs to the application: it may have seeded it, or test with it."""
SPREAD = 0.2
"""Each wait is lengthened by up to this share, at random, so that callers that failed together spread out."""


class Backoff:
    """Exponential back-off: each wait is twice the previous one, up to a bound; a success resets it."""

    __slots__ = ("_first", "_most", "_next")

    def __init__(self, first: float, most: float) -> None:
        """`first`, `most`: the first and the longest wait in seconds, before the random lengthening."""
        self._first = self._next = first
        self._most = most

    def next(self) -> float:
        """The seconds to wait after a failure."""
        seconds = self._next
        self._next = min(seconds * 2, self._most)
        return seconds * (1 + SPREAD * CHANCE.random())

    def reset(self) -> None:
        """Start again with the first wait; call this after a success."""
        self._next = self._first
