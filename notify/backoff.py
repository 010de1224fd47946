"""Waits between attempts at what failed for now."""

from __future__ import annotations

import random

SPREAD = 0.2
"""A wait is longer by up to this share of it, so that those who failed together do not try again together."""


class Backoff:
    """Each wait is twice as long as the one before, up to a bound; after a success they begin anew."""

    __slots__ = ("_first", "_most", "_next")

    def __init__(self, first: float, most: float) -> None:
        """`first` and `most` in seconds, before they are spread."""
        self._first = self._next = first
        self._most = most

    def next(self) -> float:
        """Seconds to wait now, after one more failure."""
        seconds = self._next
        self._next = min(seconds * 2, self._most)
        return seconds * (1 + SPREAD * random.random())

    def reset(self) -> None:
        """An attempt succeeded."""
        self._next = self._first
