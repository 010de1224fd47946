"""Puts each delayed message into its queue when it is due."""

from __future__ import annotations

from notify.storage.log.entry import (
    ENTRY_HEAD,
    ENTRY_SIZE,
    FLAG_FORCED,
    FLAG_TTL,
    Entry,
    EntryKind,
    tail_of,
)
from notify.storage.log.journal import Journal
from notify.storage.log.queues import Queue
from notify.storage.log.records import RELEASED, RecordType
from notify.storage.log.state import LogState


class Delays:
    """Releases the messages that are due by the time index (times.py)."""

    def __init__(self, state: LogState, journal: Journal) -> None:
        self._state = state
        self._journal = journal

    def release_due(self, now_us: int, limit: int) -> int:
        state, times = self._state, self._state.times
        due_us = times.next_due_us()
        if due_us is None or due_us > now_us:
            return 0
        self._journal.reserve(4096 + ENTRY_SIZE * limit)
        entries: list[bytes] = []
        queues: list[Queue | None] = []
        due, taken = times.pop_due(now_us, limit)
        for raw in due:
            entry = Entry.of(raw)
            queue = state.topics_by_id[entry.topic].queue_now(entry.queue, raw)
            offset = queue.next_offset
            queue.next_offset = offset + 1
            flags = entry.flags & (FLAG_TTL | FLAG_FORCED)
            head = ENTRY_HEAD.pack(EntryKind.QUEUE, flags, queue.number, entry.topic, now_us, offset)
            entries.append(head + tail_of(raw))
            queues.append(queue)
        self._journal.append(RecordType.RELEASE, RELEASED.pack(*times.released), entries, queues)
        return taken

    def next_due_us(self) -> int | None:
        return self._state.times.next_due_us()

    def delayed(self) -> int:
        return self._state.times.waiting()
