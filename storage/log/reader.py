"""Reads queues from an offset on, by tag, by key, by time, and by id."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from notify.protocol.keys import key_hash
from notify.storage.log.entry import ENTRY, Entry, EntryKind, table_of
from notify.storage.log.payloads import Payloads
from notify.storage.log.queues import Queue
from notify.storage.log.sealed import SealedPart
from notify.storage.log.state import LogState
from notify.storage.message_run import LEAST, KeptRuns, MessageRun
from notify.storage.records import StoredMessage


class Reader:
    """The visible messages of all queues."""

    def __init__(self, state: LogState, payloads: Payloads) -> None:
        self._state = state
        self._payloads = payloads
        self._runs = KeptRuns()

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        where = self._state.queue(topic, queue)
        return where.start, where.visible

    def count(self, topic: str, queue: int, first: int, end: int) -> int:
        key = self._state.queue(topic, queue).key
        return max(0, end - first - self._state.gaps.between(key, first, end))

    def gaps(self, topic: str, queue: int) -> list[tuple[int, int]]:
        key = self._state.queue(topic, queue).key
        return [(first, first + count) for first, count in self._state.gaps.of(key)]

    def read(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> list[StoredMessage]:
        where = self._state.queue(topic, queue)
        return self._payloads.messages(where, self._entries(where, offset, limit), max_bytes)

    def read_run(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> MessageRun | None:
        where = self._state.queue(topic, queue)
        count = min(limit, where.visible - offset)
        if offset < where.start or count < LEAST:
            return None
        kept = self._runs.get(where.key, offset, count)
        if kept is not None:
            return kept
        run = self._payloads.run(where, self._state.parts.read(where.key, offset, count), offset, max_bytes)
        if run is not None:
            self._runs.keep(where.key, run)
        return run

    def _entries(self, queue: Queue, offset: int, limit: int) -> bytes:
        """Visible entries of a queue from an offset on, joined."""
        offset = max(offset, queue.start)
        return self._state.parts.read(queue.key, offset, min(limit, queue.visible - offset))

    def read_tagged(
        self, topic: str, queue: int, offset: int, limit: int, max_bytes: int, tags: frozenset[int]
    ) -> tuple[list[StoredMessage], int]:
        where = self._state.queue(topic, queue)
        entries = self._entries(where, offset, limit)
        if not entries:
            return [], offset
        table = table_of(entries)
        wanted = table[np.isin(table["tag_hash"], np.fromiter(tags, np.uint32))]
        messages = self._payloads.messages(where, wanted.tobytes(), max_bytes)
        if len(messages) < len(wanted):
            return messages, messages[-1].offset + 1
        return messages, int(table["offset"][-1]) + 1

    def read_hashes(
        self, topic: str, queue: int, offset: int, limit: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        table = table_of(self._entries(self._state.queue(topic, queue), offset, limit))
        return table["offset"].copy(), table["key_hash"].copy(), table["tag_hash"].copy()

    def read_ids(self, topic: str, queue: int, offset: int, limit: int) -> list[tuple[int, bytes]]:
        entries = self._entries(self._state.queue(topic, queue), offset, limit)
        return [(entry.time_us, entry.transaction_id) for entry in map(Entry._make, ENTRY.iter_unpack(entries))]

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> Iterator[StoredMessage]:
        wanted = key_hash(key)
        only = None
        if topic is not None:
            if topic not in self._state.topics:
                return iter(())
            only = self._state.topics[topic].id
        matches: list[tuple[int, int, bytes]] = []
        for part in self._state.parts:
            if isinstance(part, SealedPart) and (part.time_min >= until_us or part.time_max < from_us):
                continue
            for raw in part.keyed(wanted):
                entry = Entry.of(raw)
                if from_us <= entry.time_us < until_us and only in (None, entry.topic):
                    matches.append((entry.time_us, entry.offset, raw))
            if len(matches) >= limit and isinstance(part, SealedPart):
                break
        matches.sort(key=lambda match: match[:2])
        return (self._payloads.message(raw) for _, _, raw in matches[:limit])

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        where = self._state.queue(topic, queue)
        low, high = where.start, where.visible
        while low < high:
            middle = (low + high) // 2
            entry = self._entries(where, middle, 1)
            if not entry or Entry.of(entry).time_us >= time_us:
                high = middle
            else:
                low = middle + 1
        return low

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        return [
            self._payloads.message(entry)
            for part in reversed(list(self._state.parts.holding(transaction_id)))
            for entry in part.lookup(transaction_id)
            if entry[0] == EntryKind.QUEUE
        ]

    def entry_at(self, topic: str, queue: int, offset: int) -> Entry | None:
        """The entry of a visible message; None if there is none."""
        raw = self._entries(self._state.queue(topic, queue), offset, 1)
        entry = Entry.of(raw) if raw else None
        return entry if entry is not None and entry.offset == offset else None
