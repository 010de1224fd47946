"""Wakes the queues of a group whose retries come due."""

from __future__ import annotations

import heapq
import itertools

from notify.server.delivery.cursor import Cursor


class Retries:
    """The times at which queues of one group have a retry."""

    __slots__ = ("_due", "_numbers")

    def __init__(self) -> None:
        self._due: list[tuple[int, int, Cursor]] = []
        self._numbers = itertools.count()

    def add(self, cursor: Cursor, due_us: int) -> None:
        """Note that a queue has a retry at this time."""
        heapq.heappush(self._due, (due_us, next(self._numbers), cursor))

    def next_us(self) -> int | None:
        """When the next retry comes due; None if there is none."""
        return self._due[0][0] if self._due else None

    def take_due(self, now_us: int) -> list[Cursor]:
        """The queues whose retries have come due by now."""
        cursors: list[Cursor] = []
        while self._due and self._due[0][0] <= now_us:
            cursors.append(heapq.heappop(self._due)[2])
        return cursors
