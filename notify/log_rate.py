"""How often something may be said in the log that strangers can bring about: a log that they fill is a full disk."""

from __future__ import annotations

import time


class LogRate:
    """So many lines a second; what is beyond is left out."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = 0
        self._count = 0

    def may(self) -> bool:
        """Whether one more line may be written now; it counts as written."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._per_second
