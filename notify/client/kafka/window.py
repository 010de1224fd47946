"""Window: the fetched records of a partition that are not done, and the offsets after the first of them that are done.

It uses neither Kafka nor a clock: offsets go in; items to handle, and the progress to commit, come out.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Any

import msgspec

from notify.kafka.progress import MOST_BEGUN, MOST_FAILED, MOST_SPAN, Progress

FORGET_AT = 1024
"""The number of done offsets at which those below the position are dropped."""
NOTED = 512
"""After a process died, the attempts of this many records are noted before they begin. About as many records end
between two commits at most, so that the record that killed the process is among them, now or after further ones."""


class Item(msgspec.Struct, gc=False):
    """A record that is not done.

    `attempt`: the number of its next attempt, from 1. `due_us`: the earliest time of the attempt, in microseconds since
    1970. `is_orphan`: whether its last attempt was noted when it began, and ended with its process.
    """

    offset: int
    key: bytes | None
    size: int
    record: Any
    attempt: int = 1
    due_us: int = 0
    is_orphan: bool = False


class Window:
    """The open items of a partition.

    An item first waits behind another item of its key, or until it is due. Then it is ready, is handled, and perhaps
    leaves for another topic; then it is done. If the partition's last consumer did not end properly, an item's attempt
    is noted before the item is ready.
    """

    def __init__(self, progress: Progress, *, in_order: bool, most: int, most_bytes: int) -> None:
        """`in_order`: whether only one item of a key is handled at a time. `most`, `most_bytes`: when it is full."""
        self.in_order = in_order
        self._most, self._most_bytes = most, most_bytes
        self._open: OrderedDict[int, Item] = OrderedDict()
        self._done = set(progress.done)
        self._failed = dict(progress.failed)
        for offset in progress.begun:
            self._failed[offset] = self._failed.get(offset, 0) + 1
        self._failing: set[int] = set()
        """The offsets of open items that have failed. `_failed` also has failed offsets of the committed progress
        whose records are not fetched yet, or are gone."""
        self._orphans = progress.begun
        self._told = max((*progress.done, *self._failed), default=-1)
        """The last offset that the committed progress says something about."""
        self._to_note = 0 if progress.left else NOTED
        self._not_noted: deque[Item] = deque()
        self._begun: set[int] = set()
        self._next = progress.offset
        self._end = -1
        """The partition's end, when it was last read to its end."""
        self._ready: deque[Item] = deque()
        self._due: list[tuple[int, int]] = []
        self._lines: dict[bytes, deque[Item]] = {}
        self._handled: set[int] = set()
        self._leaving: set[int] = set()
        self._bytes = 0
        self._forget_at = FORGET_AT
        self.reset = progress.reset
        self.topic_id = progress.topic
        """Kafka's id of the topic; empty if unknown."""
        self.last = progress.last
        """The offset and leader epoch of the last record that was read; None if unknown."""
        self._is_stopped = False
        self.is_closed = False
        """Whether the partition belongs to another instance or window, so that nothing is handled or committed."""
        self.changes = 0
        """The number of changes of the progress so far."""

    # --- in and out -------------------------------------------------------------------------------------------

    def add(self, item: Item) -> bool:
        """Add a fetched record; False if it is open or done already."""
        if item.offset < self._next:
            return False
        self._next = item.offset + 1
        if item.offset in self._done:
            self.changes += 1
            return False
        item.attempt += self._failed.get(item.offset, 0)
        item.is_orphan = item.offset in self._orphans
        self._open[item.offset] = item
        if item.offset in self._failed:
            self._failing.add(item.offset)
        self._bytes += item.size
        if not self.in_order or self._heads_line(item):
            self._enter(item)
        return True

    def add_all(self, items: list[Item]) -> None:
        """Add fetched records in the order of their offsets."""
        first = items[0].offset
        if first < self._next or first <= self._told or self._to_note or [item for item in items if item.due_us]:
            for item in items:
                self.add(item)
            return
        self._next = items[-1].offset + 1
        self._open.update([(item.offset, item) for item in items])
        self._bytes += sum([item.size for item in items])
        self._ready.extend([item for item in items if self._heads_line(item)] if self.in_order else items)

    def _heads_line(self, item: Item) -> bool:
        """Put an item into the line of its key; whether no other item of the key is before it."""
        if item.key is None:
            return True
        line = self._lines.get(item.key)
        if line is None:
            self._lines[item.key] = deque((item,))
            return True
        line.append(item)
        return False

    def reach(self, end: int) -> None:
        """Note that everything before this offset was fetched; the last offsets may be transaction markers."""
        self._end = end
        if end > self._next:
            self._next = end
            self.changes += 1

    def _enter(self, item: Item) -> None:
        if item.due_us:
            heapq.heappush(self._due, (item.due_us, item.offset))
        else:
            self._admit(item)

    def _admit(self, item: Item) -> None:
        if self._to_note:
            self._to_note -= 1
            self._not_noted.append(item)
        else:
            self._ready.append(item)

    def note(self, most: int) -> list[Item]:
        """At most `most` items whose attempts the next commit notes; after the commit, pass them to `noted`.

        An orphan is only ever the first of them.
        """
        count = min(most, len(self._not_noted), MOST_BEGUN - len(self._begun)) if not self._is_stopped else 0
        items: list[Item] = []
        while len(items) < count and not (items and self._not_noted[0].is_orphan):
            items.append(self._not_noted.popleft())
        self._begun.update([item.offset for item in items])
        self.changes += bool(items)
        return items

    def noted(self, items: list[Item]) -> None:
        """Make items ready whose attempts are noted."""
        self._ready.extend(items)

    def wake(self, now_us: int) -> None:
        """Make items ready that are due."""
        while self._due and self._due[0][0] <= now_us:
            self._admit(self._open[heapq.heappop(self._due)[1]])

    def take(self, most: int) -> list[Item]:
        """The next items to handle; empty if no item is ready, or if the first open item is too far behind it."""
        ready, end = self._ready, self.position + MOST_SPAN
        if self._is_stopped:
            return []
        if self._next <= end:
            items = [ready.popleft() for _ in range(min(most, len(ready)))]
        else:
            items = []
            while ready and len(items) < most and ready[0].offset < end:
                items.append(ready.popleft())
        self._handled.update([item.offset for item in items])
        return items

    def put_back(self, item: Item) -> None:
        """Return a taken item that is not handled after all. If its attempt was noted, that is noted again before the
        item is ready."""
        self._handled.discard(item.offset)
        if item.offset in self._begun:
            self._begun.discard(item.offset)
            self._not_noted.appendleft(item)
            self.changes += 1
        else:
            self._ready.appendleft(item)

    def stop(self) -> None:
        """Let no more items be taken; taken items may still finish. Once they have, the partition is left properly."""
        self._is_stopped = True
        self._begun &= self._handled
        self.changes += 1

    # --- an item's fate ---------------------------------------------------------------------------------------

    def finish(self, item: Item) -> None:
        """Note that an item is done, after it was handled or has arrived in another topic."""
        self.finish_all([item])

    def finish_all(self, items: list[Item]) -> None:
        """Note that items are done; see `finish`."""
        offsets = [item.offset for item in items]
        for offset in offsets:
            del self._open[offset]
        self._handled.difference_update(offsets)
        self._bytes -= sum([item.size for item in items])
        self._done.update(offsets)
        for noted in (self._leaving, self._begun, self._failing):
            if noted:
                noted.difference_update(offsets)
        if self._failed:
            for offset in offsets:
                self._failed.pop(offset, None)
        self._forget_passed()
        self.changes += len(items)
        if self.in_order:
            for item in items:
                self._leave_line(item)

    def _leave_line(self, item: Item) -> None:
        """The next item of its key may be handled."""
        if item.key is None:
            return
        line = self._lines[item.key]
        line.popleft()
        if line:
            self._enter(line[0])
        else:
            del self._lines[item.key]

    def fail(self, item: Item, due_us: int) -> None:
        """Note that a taken item failed: its next attempt is due at `due_us`, and with `in_order` its key waits."""
        self._handled.discard(item.offset)
        self._begun.discard(item.offset)
        self._failed[item.offset] = self._failed.get(item.offset, 0) + 1
        self._failing.add(item.offset)
        item.is_orphan = False
        item.attempt += 1
        item.due_us = due_us
        heapq.heappush(self._due, (due_us, item.offset))
        self.changes += 1

    def leave(self, item: Item) -> None:
        """Note that a taken item is on its way to another topic; call `finish` once it has arrived there."""
        self._handled.discard(item.offset)
        self._leaving.add(item.offset)
        self.changes += 1

    def _forget_passed(self) -> None:
        """Now and then drop done offsets below the position, which the committed offset covers."""
        if len(self._done) > self._forget_at:
            position = self.position
            self._done = {offset for offset in self._done if offset >= position}
            self._forget_at = max(FORGET_AT, 2 * len(self._done))

    # --- looks ------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The offset of the first open item, or of the next record."""
        return next(iter(self._open), self._next)

    @property
    def next(self) -> int:
        """The offset after the last fetched record."""
        return self._next

    @property
    def is_at_end(self) -> bool:
        """Whether nothing has come since the partition was read to its end."""
        return self._end == self._next

    def progress(self, leaving: Collection[int] = (), *, stays: bool = False) -> Progress:
        """The progress to commit. `leaving`: the offsets of items that leave with the same transaction.

        `stays`: no item leaves, and an attempt of each item that should leave counts as failed.
        """
        position = next((offset for offset in self._open if offset not in leaving), self._next)
        done = frozenset(offset for offset in (*self._done, *leaving) if offset >= position)
        failed = {
            offset: count for offset, count in self._failed.items() if offset not in leaving and offset >= position
        }
        if stays:
            failed |= {offset: failed.get(offset, 0) + 1 for offset in self._leaving}
        if len(failed) > MOST_FAILED:
            most = sorted(failed, key=lambda offset: failed[offset], reverse=True)[:MOST_FAILED]
            failed = {offset: failed[offset] for offset in most}
        begun = frozenset(offset for offset in self._begun if offset not in leaving)
        is_left = self._is_stopped and not self._handled
        return Progress(position, done, failed, self.reset, begun, is_left, self.topic_id, self.last)

    @property
    def is_full(self) -> bool:
        """Whether no more records should be fetched now."""
        return (
            len(self._open) >= self._most
            or self._bytes >= self._most_bytes
            or self._next - self.position >= MOST_SPAN
            or len(self._failing) >= MOST_FAILED
        )

    @property
    def has_room(self) -> bool:
        """Whether fetching may resume."""
        return (
            len(self._open) <= self._most // 2
            and self._bytes <= self._most_bytes // 2
            and self._next - self.position <= MOST_SPAN // 2
            and len(self._failing) <= MOST_FAILED // 2
        )

    @property
    def count(self) -> int:
        """The number of items that are not done."""
        return len(self._open)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def has_to_note(self) -> bool:
        """Whether items wait for their attempts to be noted, and more may be noted."""
        return bool(self._not_noted) and len(self._begun) < MOST_BEGUN and not self._is_stopped

    @property
    def tries(self) -> int:
        """The number of items whose attempts were noted and have not ended."""
        return len(self._begun)

    @property
    def has_orphan_to_note(self) -> bool:
        """Whether the next item to note is an orphan."""
        return self.has_to_note and self._not_noted[0].is_orphan

    @property
    def tries_orphan(self) -> bool:
        return not self._orphans.isdisjoint(self._begun)

    @property
    def next_due_us(self) -> int | None:
        return self._due[0][0] if self._due else None
