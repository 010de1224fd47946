"""Lot: decides how many records one poll asks for: few for slow handlers, many for quick ones.

A poll goes to the client's thread and back, which takes some milliseconds on a busy machine. If each poll brought few
records, this would limit quick handlers. But if a slow handler has many records waiting, they delay records of other
partitions that come after them.
"""

from __future__ import annotations

MOST = 2_000
MOST_LOW = 32
QUICK_SECONDS = 0.2
"""If a whole lot is handled within this time, the next lot is larger."""


class Lot:
    """The size doubles while whole lots are handled quickly; otherwise it is halved, down to the consumer's `batch`."""

    def __init__(self, batch: int) -> None:
        self._least = batch
        self._size = batch
        self._came, self._came_at = 0, 0.0

    def came(self, now: float, count: int) -> None:
        """Note that a poll has brought `count` records. `now`: seconds of a monotonic clock."""
        self._came, self._came_at = count, now

    def next(self, now: float) -> int:
        """How many records the next poll asks for. The time of the poll itself does not count as handling."""
        was_quick = self._came >= self._size and now - self._came_at < QUICK_SECONDS
        size = min(max(2 * self._size, 2), MOST) if was_quick else self._size // 2
        self._size = max(size, self._least)
        return self._size

    @property
    def low(self) -> int:
        """The number of ready items, at least 1, below which more are fetched, although others may wait behind them."""
        return min(self._least, MOST_LOW) // 2 + 1

    @property
    def half(self) -> int:
        """The number of items that are not done below which more are fetched, so that they come while the last half of
        a lot is handled; 0 for slow handlers."""
        return self._size // 2 if self._size > self._least else 0
