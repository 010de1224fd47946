"""How many records one poll asks for: few where handlers are slow, many where they are quick.

A poll is a way to the client's thread and back, some milliseconds on a busy machine, which would be the rate of quick
handlers if each brought few records. Records that wait behind a slow handler, though, hold up those of other partitions
that come after them.
"""

from __future__ import annotations

MOST = 1_000
QUICK_SECONDS = 0.1
"""A whole lot that is handled within this time was too small."""


class Lot:
    """It doubles while whole lots are handled quickly, and else is halved, down to the consumer's `batch`."""

    def __init__(self, batch: int) -> None:
        self._least = batch
        self._size = batch
        self._asked_at = 0.0

    def next(self, now: float, came: int) -> int:
        """The records that the next poll asks for.

        `now`: in seconds, of a clock that never goes back. `came`: the records that the last poll brought.
        """
        was_quick = came >= self._size and now - self._asked_at < QUICK_SECONDS
        self._asked_at = now
        size = min(max(2 * self._size, 2), MOST) if was_quick else self._size // 2
        self._size = max(size, self._least)
        return self._size

    @property
    def low(self) -> int:
        """With fewer ready than this, at least 1, more are asked for."""
        return self._size // 2 + 1
