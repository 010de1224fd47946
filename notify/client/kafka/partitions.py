"""The partitions that an instance has, and whose turn it is among them."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import OrderedDict
from collections.abc import Iterable

from notify.client.kafka.window import Item, Window
from notify.clock import steady_clock
from notify.kafka.progress import Progress

log = logging.getLogger("notify.consumer")

Place = tuple[str, int]
"""A topic and a partition."""
WINDOW_BYTES = 8 << 20
"""A partition's records that are not done take so much memory at most, and one record more."""


class Partitions:
    """Belongs to the event loop; nothing here waits."""

    def __init__(self, most: int) -> None:
        """`most`: records of a partition in memory."""
        self._most = most
        self._windows: dict[Place, Window] = {}
        self._turns: OrderedDict[Window, None] = OrderedDict()
        self._due: list[tuple[int, int, Window]] = []
        self._due_at: dict[Window, int] = {}
        self._number = 0
        self.paused: set[Place] = set()
        """Partitions that are not fetched, because their windows are full or nothing is to be handled."""
        self.changed = asyncio.Event()
        """Set when there may be something to commit."""
        self.has_to_note = False
        """Whether attempts may have to be noted before they begin."""
        self._jumps: dict[Place, tuple[int, int]] = {}

    def open(self, place: Place, progress: Progress, *, in_order: bool) -> Window:
        self.close([place])
        window = Window(progress, in_order=in_order, most=self._most, most_bytes=WINDOW_BYTES)
        self._windows[place] = window
        return window

    def close(self, places: Iterable[Place]) -> None:
        """Forget partitions: nothing of theirs is handled or committed any more."""
        for place in places:
            window = self._windows.pop(place, None)
            self.paused.discard(place)
            if window is not None:
                window.is_closed = True
                self._turns.pop(window, None)
                if self._due_at.pop(window, None) is not None:
                    # Its records would stay in memory until they are due.
                    self._due = [entry for entry in self._due if entry[2] is not window]
                    heapq.heapify(self._due)

    def get(self, place: Place) -> Window | None:
        return self._windows.get(place)

    def items(self) -> list[tuple[Place, Window]]:
        return list(self._windows.items())

    def begin_anew(self, window: Window, offset: int) -> Window:
        """A record came that lies before those that have come: the partition's log was cut, or its topic made anew.

        Whatever is there now is handled, some of it perhaps again.
        """
        place = next(place for place, known in self._windows.items() if known is window)
        log.warning(
            "topic %s goes on at %d in partition %d, after %d: it was made anew, or its last records are lost",
            place[0], offset, place[1], window.next,
        )  # fmt: skip
        anew = self.open(place, Progress(offset, reset=window.reset, left=True), in_order=window.in_order)
        anew.changes += 1
        return anew

    def add(self, window: Window, item: Item) -> None:
        """A record was fetched. One of a partition that has left meanwhile is forgotten."""
        if not window.is_closed:
            if item.offset > window.next + 1:  # the marker of one transaction is passed everywhere
                self._note_jump(window.next, item)
            window.add(item)
            self.look(window)

    def _note_jump(self, start: int, item: Item) -> None:
        place: Place = item.record.topic(), item.record.partition()
        known = self._jumps.get(place, (0, 0))
        if item.offset - start > known[1] - known[0]:
            self._jumps[place] = start, item.offset

    def take_jumps(self) -> dict[Place, tuple[int, int]]:
        """The longest run of offsets in each partition that brought no record, since the last call: its first offset,
        and the one behind it. It was of transactions that were taken back, or was deleted before it was fetched."""
        jumps, self._jumps = self._jumps, {}
        return jumps

    def reach(self, window: Window, end: int) -> None:
        """A partition was read up to this offset, where it ends now: behind its last record, or a transaction's own."""
        window.reach(end)
        self.look(window)

    def look(self, window: Window) -> None:
        """Something changed in a window: note when it has something to handle or to commit."""
        if window.is_closed:
            return
        self.changed.set()
        self.has_to_note = self.has_to_note or window.has_to_note
        if window.ready:
            self._turns.setdefault(window)
        due_us = window.next_due_us
        if due_us is not None and due_us < self._due_at.get(window, due_us + 1):
            self._number += 1
            self._due_at[window] = due_us
            heapq.heappush(self._due, (due_us, self._number, window))

    def take(self) -> tuple[Window, Item] | None:
        """The next item to handle, the partitions by turns; None where nothing is ready."""
        self._wake(steady_clock())
        for _ in range(len(self._turns)):
            window, _ = self._turns.popitem(last=False)
            item = window.take()
            if item is not None:
                if window.ready:
                    self._turns[window] = None
                return window, item
        return None

    def _wake(self, now_us: int) -> None:
        while self._due and self._due[0][0] <= now_us:
            due_us, _, window = heapq.heappop(self._due)
            if self._due_at.get(window) == due_us:
                del self._due_at[window]
                window.wake(now_us)
                self.look(window)

    @property
    def next_due_us(self) -> int | None:
        """When the next record that waits is due, in microseconds since 1970."""
        return self._due[0][0] if self._due else None

    def has_ready(self, count: int) -> bool:
        """Whether at least so many items, from 1, are ready."""
        for window in self._turns:
            count -= window.ready
            if count <= 0:
                return True
        return False

    def to_pause(self, *, all_of_them: bool) -> list[Place]:
        """Partitions that are fetched, and not to be: those whose windows are full, or all."""
        return [p for p, window in self._windows.items() if p not in self.paused and (all_of_them or window.is_full)]

    def to_resume(self) -> list[Place]:
        """Partitions that are paused and have room again."""
        return [place for place in self.paused if self._windows[place].has_room]
