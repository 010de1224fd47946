"""LogRate: bounds log lines that strangers can cause, so that they cannot fill the disk."""

from __future__ import annotations

import time


class LogRate:
    """Allows `per_second` lines a second; further lines are left out."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = 0
        self._count = 0

    def may(self) -> bool:
        """Whether another line may be written now; if so, it counts as written."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._per_second
