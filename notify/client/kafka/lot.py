"""How many records one poll asks for: few where handlers are slow, many where they are quick.

A poll is a way to the client's thread and back, some milliseconds on a busy machine, which would be the rate of quick
handlers if each brought few records. Records that wait behind a slow handler, though, hold up those of other partitions
that come after them.
"""

from __future__ import annotations

MOST = 1_000
MOST_LOW = 32
QUICK_SECONDS = 0.1
"""A whole lot that is handled within this time was too small."""


class Lot:
    """It doubles while whole lots are handled quickly, and else is halved, down to the consumer's `batch`."""

    def __init__(self, batch: int) -> None:
        self._least = batch
        self._size = batch
        self._came, self._came_at = 0, 0.0

    def came(self, now: float, count: int) -> None:
        """A poll has brought so many records. `now`: in seconds, of a clock that never goes back."""
        self._came, self._came_at = count, now

    def next(self, now: float) -> int:
        """The records that the next poll asks for. The time of the poll itself does not count against handlers."""
        was_quick = self._came >= self._size and now - self._came_at < QUICK_SECONDS
        size = min(max(2 * self._size, 2), MOST) if was_quick else self._size // 2
        self._size = max(size, self._least)
        return self._size

    @property
    def low(self) -> int:
        """With fewer ready than this, at least 1, more are asked for.

        Few: the client's thread and handlers in the loop's hold up each other, a switch for every record of a poll.
        """
        return min(self._least, MOST_LOW) // 2 + 1
