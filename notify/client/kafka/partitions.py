"""Partitions: the windows of an instance's partitions, which take turns."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Iterable

from notify.client.kafka.window import Item, Window
from notify.kafka.progress import Progress
from notify.runtime.clock import steady_clock
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

Place = tuple[str, int]
"""A topic and a partition."""
WINDOW_BYTES = 8 << 20
"""The memory of a partition's open records at which its window is full."""


class Partitions:
    """The open windows of one instance. Belongs to the event loop; none of its methods wait."""

    def __init__(self, most: int) -> None:
        """`most`: the most records of a partition in memory."""
        self._most = most
        self._windows: dict[Place, Window] = {}
        self._turns: OrderedDict[Window, None] = OrderedDict()
        self._due: list[tuple[int, int, Window]] = []
        self._due_at: dict[Window, int] = {}
        self._number = 0
        self.paused: set[Place] = set()
        """Partitions that are not fetched, because their windows are full, or because nothing is handled now."""
        self.changed = asyncio.Event()
        """Set when there may be progress to commit."""
        self.has_to_note = False
        """Whether some attempts may have to be noted before they begin."""
        self._jumps: dict[Place, tuple[int, int]] = {}

    def open(self, place: Place, progress: Progress, *, in_order: bool) -> Window:
        self.close([place])
        window = Window(progress, in_order=in_order, most=self._most, most_bytes=WINDOW_BYTES)
        self._windows[place] = window
        return window

    def close(self, places: Iterable[Place]) -> None:
        """Forget partitions: their records are neither handled nor committed any more."""
        for place in places:
            window = self._windows.pop(place, None)
            self.paused.discard(place)
            if window is not None:
                window.is_closed = True
                self._turns.pop(window, None)
                if self._due_at.pop(window, None) is not None:
                    # Otherwise the window's records would stay in memory until they are due.
                    self._due = [entry for entry in self._due if entry[2] is not window]
                    heapq.heapify(self._due)

    def get(self, place: Place) -> Window | None:
        return self._windows.get(place)

    def items(self) -> list[tuple[Place, Window]]:
        return list(self._windows.items())

    def begin_anew(self, window: Window, offset: int) -> Window:
        """Open a new window at an offset below the records that came before: the partition's log was cut, or its topic
        was recreated.

        All records that are there now are handled, some of them perhaps again.
        """
        place = next(place for place, opened in self._windows.items() if opened is window)
        log.warning(
            "topic %s continues at %d in partition %d, after %d: it was recreated, or its last records are lost",
            place[0], offset, place[1], window.next,
        )  # fmt: skip
        replacement = self.open(place, Progress(offset, reset=window.reset, left=True), in_order=window.in_order)
        replacement.changes += 1
        return replacement

    def add(self, window: Window, items: list[Item]) -> None:
        """Add fetched records to their window, in the order of their offsets, unless the window was closed meanwhile;
        then call `look`."""
        if window.is_closed:
            return
        if items[-1].offset >= window.next + len(items):
            expected = window.next
            for item in items:
                if item.offset > expected + 1:  # a gap of one offset is usual: the marker of a transaction
                    self._note_jump((item.record.topic(), item.record.partition()), expected, item.offset)
                expected = item.offset + 1
        window.add_all(items)

    def _note_jump(self, place: Place, start: int, end: int) -> None:
        longest = self._jumps.get(place, (0, 0))
        if end - start > longest[1] - longest[0]:
            self._jumps[place] = start, end

    def take_jumps(self) -> dict[Place, tuple[int, int]]:
        """For each partition, the longest range of offsets without a record since the last call: its first offset, and
        the offset after it. Its records belonged to aborted transactions, or were deleted before they were fetched."""
        jumps, self._jumps = self._jumps, {}
        return jumps

    def reach(self, place: Place, window: Window, end: int) -> None:
        """Note that a partition was read to its end, the offset after its last record or transaction marker."""
        if end > window.next + 1 and not window.is_closed:
            self._note_jump(place, window.next, end)
        window.reach(end)
        self.look(window)

    def look(self, window: Window) -> None:
        """Call this after a change in a window: note whether it has items to handle, or progress to commit."""
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

    def take(self, most: int) -> list[tuple[Window, list[Item]]]:
        """The next items to handle: of each partition in its turn its share of `most`."""
        self._wake(steady_clock())
        taken: list[tuple[Window, list[Item]]] = []
        for turns in range(len(self._turns), 0, -1):
            if most <= 0:
                break
            window, _ = self._turns.popitem(last=False)
            items = window.take(-(-most // turns))
            if items:
                most -= len(items)
                taken.append((window, items))
                if window.ready:
                    self._turns[window] = None
        return taken

    def _wake(self, now_us: int) -> None:
        while self._due and self._due[0][0] <= now_us:
            due_us, _, window = heapq.heappop(self._due)
            if self._due_at.get(window) == due_us:
                del self._due_at[window]
                window.wake(now_us)
                self.look(window)

    @property
    def next_due_us(self) -> int | None:
        """When the next waiting record is due, in microseconds since 1970."""
        return self._due[0][0] if self._due else None

    def has_ready(self, count: int) -> bool:
        """Whether at least `count` items (1 or more) are ready."""
        for window in self._turns:
            count -= window.ready
            if count <= 0:
                return True
        return False

    @property
    def count(self) -> int:
        """The number of items that are not done."""
        return sum([window.count for window in self._windows.values()])

    def to_pause(self, *, all_of_them: bool) -> list[Place]:
        """The partitions to pause: those that are fetched although their windows are full, or all that are fetched."""
        return [p for p, window in self._windows.items() if p not in self.paused and (all_of_them or window.is_full)]

    def to_resume(self) -> list[Place]:
        """The paused partitions whose windows have room again."""
        return [place for place in self.paused if self._windows[place].has_room]
