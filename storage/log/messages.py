"""Reading the log: queues from an offset on, by tag, by key, by time, by id; and releasing delayed messages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from notify.storage.groups import Settlement
from notify.storage.hashing import key_hash
from notify.storage.log import settlements
from notify.storage.log.disk import Disk
from notify.storage.log.format import (
    ENTRY,
    ENTRY_HEAD,
    ENTRY_HEAD_SIZE,
    ENTRY_SIZE,
    FLAG_FORCED,
    FLAG_TTL,
    RELEASED,
    EntryKind,
    RecordType,
    crc32c,
    is_forced,
)
from notify.storage.log.journal import Journal
from notify.storage.log.parts import Part
from notify.storage.log.pending import Pending
from notify.storage.log.queues import Queue
from notify.storage.log.sealed import ENTRY_TYPE, SealedPart
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.records import InDoubt, State, StoredMessage, Transaction

READ_AHEAD_BYTES = 1 << 20
READ_GAP_BYTES = 16 << 10
"""Between two payloads of one read: copying so much costs as much as another call to the system."""
PLACES = 4096
"""How many readers' places are remembered, at most: where a queue's next entries lie."""


class _Ttl(msgspec.Struct):
    """The part of a payload that says when it expires."""

    ttl: float = 0


_decode_ttl = msgspec.msgpack.Decoder(_Ttl).decode


class LogMessages:
    """Mixed into LogStore."""

    state: LogState
    journal: Journal
    segments: Segments
    disk: Disk
    corrupt_messages: int
    _places: dict[tuple[int, int], Part]
    """(queue, offset) to the part in which a reader that went on from there will find its entries."""

    # --- reading ----------------------------------------------------------------------------------------------

    def read(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> list[StoredMessage]:
        found = self.state.queue(topic, queue)
        return self._stored(found, self._entries(found, offset, limit), max_bytes)

    def _entries(self, queue: Queue, offset: int, limit: int) -> bytes:
        """Visible entries of a queue from an offset on, joined."""
        offset = max(offset, queue.start)
        limit = min(limit, queue.visible - offset)
        if limit <= 0:
            return b""
        parts = self.state.parts
        at = self._part_of(queue, offset)
        blobs: list[bytes] = []
        while limit > 0 and at < len(parts):
            blob = parts[at].read(queue.key, offset, limit)
            if blob:
                blobs.append(blob)
                limit -= len(blob) // ENTRY_SIZE
                offset = int.from_bytes(blob[-64:-56], "little") + 1
                if limit <= 0:
                    if len(self._places) >= PLACES:
                        self._places.clear()
                    self._places[(queue.key, offset)] = parts[at]
            at += 1
        return b"".join(blobs)

    def _part_of(self, queue: Queue, offset: int) -> int:
        """The number of the part in which a queue's entries from an offset on begin."""
        parts = self.state.parts
        place = self._places.pop((queue.key, offset), None)
        if place is not None and (number := parts.number_of(place)) is not None:
            return number
        at = len(parts) - 1
        while at > 0:
            first = parts[at].first_offset(queue.key)
            if first is not None and first <= offset:
                break
            at -= 1
        return at

    def _stored(self, queue: Queue, entries: bytes, max_bytes: int) -> list[StoredMessage]:
        """Entries with their payloads, coalescing the reads of neighbours."""
        rows = list(ENTRY.iter_unpack(entries))
        if self.state.moved:
            rows = [self._where_it_is_now(row) for row in rows]
        found: list[StoredMessage] = []
        name, number = queue.topic.name, queue.number
        window, window_at, window_end = b"", 0, 0
        total = 0
        ttl_us = queue.topic.policy.ttl_us
        for i, row in enumerate(rows):
            position, size = row[6], row[7]
            total += size
            if total > max_bytes and found:
                break
            if not (window_at <= position and position + size <= window_end):
                recent = self.segments.recent(position, size)
                if recent is not None:
                    window_at, window = recent
                    window_end = window_at + len(window)
                else:
                    window_at, window_end = position, self._reach(rows, i)
                    window = self.segments.read(window_at, window_end - window_at)
            start = position - window_at
            payload = window[start : start + size]
            corrupt = len(payload) != size or crc32c(payload) != row[13]
            if corrupt:
                self.corrupt_messages += 1
                payload = b""
            expires_us = _expiry(row, payload, ttl_us) if ttl_us or row[1] else 0
            found.append(
                StoredMessage(
                    name, number, row[5], row[11], row[8], row[4], payload, row[12], corrupt, row[14], expires_us
                )
            )
        return found

    def read_tagged(
        self, topic: str, queue: int, offset: int, limit: int, max_bytes: int, tags: frozenset[int]
    ) -> tuple[list[StoredMessage], int]:
        found = self.state.queue(topic, queue)
        entries = self._entries(found, offset, limit)
        if not entries:
            return [], offset
        table = np.frombuffer(entries, ENTRY_TYPE)
        wanted = table[np.isin(table["tag_hash"], np.fromiter(tags, np.uint32))]
        messages = self._stored(found, wanted.tobytes(), max_bytes)
        if len(messages) < len(wanted):
            return messages, messages[-1].offset + 1
        return messages, int(table["offset"][-1]) + 1

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> list[StoredMessage]:
        wanted = key_hash(key)
        only = None
        if topic is not None:
            if topic not in self.state.topics:
                return []
            only = self.state.topics[topic].id
        found: list[bytes] = []
        for part in self.state.parts:
            if isinstance(part, SealedPart) and (part.time_min >= until_us or part.time_max < from_us):
                continue
            mine = [e for e in part.keyed(wanted) if from_us <= int.from_bytes(e[8:16], "little") < until_us]
            found += [e for e in mine if only is None or int.from_bytes(e[4:8], "little") == only]
            if len(found) >= limit and isinstance(part, SealedPart):
                break
        found.sort(key=lambda e: e[8:16][::-1] + e[16:24][::-1])
        return [self._one(entry) for entry in found[:limit]]

    def _where_it_is_now(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """An entry's row with the position of its payload, which may have been carried out of a dropped segment."""
        if row[6] >= self.segments.first_base:
            return row
        return (*row[:6], self.state.moved.get(row[6], row[6]), *row[7:])

    def _reach(self, rows: list[tuple[int, ...]], first: int) -> int:
        """How far one read goes that starts at a row's payload: over neighbours with small gaps, within bounds."""
        start = rows[first][6]
        end = start + rows[first][7]
        segment = self.segments.at(start)
        if segment is None:
            return end
        for i in range(first + 1, len(rows)):
            position, size = rows[i][6], rows[i][7]
            if not end <= position <= end + READ_GAP_BYTES or position + size - start > READ_AHEAD_BYTES:
                break
            if self.segments.at(position) is not segment:
                break
            end = position + size
        return end

    def payload_at(self, position: int, size: int, crc: int) -> bytes | None:
        """A payload read back, None where the bytes are not on the disk yet or not what was written."""
        if position < self.segments.first_base:
            position = self.state.moved.get(position, position)
        payload = self.segments.read(position, size)
        return payload if len(payload) == size and crc32c(payload) == crc else None

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        found = self.state.queue(topic, queue)
        low, high = found.start, found.visible
        while low < high:
            middle = (low + high) // 2
            entry = self._entries(found, middle, 1)
            if not entry or int.from_bytes(entry[8:16], "little") >= time_us:
                high = middle
            else:
                low = middle + 1
        return low

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        return [
            self._one(entry)
            for part in reversed(list(self.state.parts.holding(transaction_id)))
            for entry in part.lookup(transaction_id)
            if entry[0] == EntryKind.QUEUE
        ]

    def _one(self, entry: bytes) -> StoredMessage:
        row = ENTRY.unpack(entry)
        topic = self.state.topics_by_id.get(row[3])
        payload = self.payload_at(row[6], row[7], row[13])
        return StoredMessage(
            topic.name if topic is not None else f"#{row[3]}",
            row[2],
            row[5],
            row[11],
            row[8],
            row[4],
            payload or b"",
            row[12],
            payload is None,
            row[14],
        )

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        where = self.state.queue(topic, queue)
        entry = self._entries(where, offset, 1)
        if not entry or ENTRY.unpack(entry)[5] != offset:
            return [], False
        awaited: dict[str, int] = {}
        for group, name in self.state.subscriptions:
            if name == topic:
                progress = self.state.group_progress(group, where.topic.id, queue)
                attempts = progress.attempts.get(offset, 0)
                if progress.is_settled(offset) or attempts:
                    awaited[group] = attempts or -1
        if not awaited:
            return [], True
        # The entry lies in its part's segment; its payload may be older.
        start = max(self.state.parts[self._part_of(where, offset)].base, ENTRY.unpack(entry)[6])
        place = (where.topic.id, queue, offset, start)
        return await asyncio.to_thread(settlements.find, self.disk, self.segments.all(), place, awaited)

    # --- delayed messages -------------------------------------------------------------------------------------

    def release_due(self, now_us: int, limit: int) -> int:
        times = self.state.times
        due_us = times.next_due_us()
        if due_us is None or due_us > now_us:
            return 0
        self.journal.reserve(4096 + ENTRY_SIZE * limit)
        entries: list[bytes] = []
        queues: list[Queue | None] = []
        for entry in times.pop_due(now_us, limit):
            row = ENTRY_HEAD.unpack_from(entry)
            queue = self.state.topics_by_id[row[3]].queue_now(row[2], entry)
            offset = queue.next_offset
            queue.next_offset = offset + 1
            head = ENTRY_HEAD.pack(
                EntryKind.QUEUE, row[1] & (FLAG_TTL | FLAG_FORCED), queue.number, row[3], now_us, offset
            )
            entries.append(head + entry[ENTRY_HEAD_SIZE:])
            queues.append(queue)
        opened = self.journal.open
        self.journal.append(RecordType.RELEASE, entries, RELEASED.pack(*times.released))
        opened.entries += entries
        opened.queues += queues
        opened.part.assigned += len(entries)
        return len(entries)

    def next_due_us(self) -> int | None:
        return self.state.times.next_due_us()

    def delayed(self) -> int:
        return self.state.times.waiting()

    def entries_of(self, transaction_id: bytes) -> list[bytes]:
        """Every entry of a transaction in log order, those on their way to the disk included."""
        parts = reversed(list(self.state.parts.holding(transaction_id)))
        found = [entry for part in parts for entry in part.lookup(transaction_id)]
        for frame in (self.journal.in_flight, self.journal.open):
            if frame is not None:
                found += [entry for entry in frame.entries if entry[48:64] == transaction_id]
        return found

    # --- for the administrator --------------------------------------------------------------------------------

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        return self._transaction(transaction_id)

    def _transaction(self, transaction_id: bytes) -> Transaction | None:
        pending = self.state.pending.by_id.get(transaction_id)
        entries = self.entries_of(transaction_id)
        stored = [e for e in entries if e[0] == EntryKind.HALF]
        ended = [e for e in entries if e[0] not in (EntryKind.HALF, EntryKind.CARRY)]
        rolled_back = bool(ended) and ended[0][0] == EntryKind.ROLLBACK  # which has one entry, for its first message
        shown = [self._one(e) for e in (stored if rolled_back and stored else ended or stored)]
        if pending is not None:
            return Transaction(
                transaction_id,
                pending.producer.group,
                State.PARKED if pending.parked else State.PREPARED,
                pending.stored_us,
                0,
                pending.producer.source,
                pending.producer.instance,
                pending.attempts,
                pending.next_check_us,
                shown,
            )
        if not ended:
            return None
        committed = ended[0][0] != EntryKind.ROLLBACK
        decided_us = int.from_bytes(ended[0][8:16], "little")
        stored_us = int.from_bytes(stored[0][8:16], "little") if stored else decided_us
        state = State.COMMITTED if committed else State.ROLLED_BACK
        group = self.state.producer_group_of(ended[0])
        forced = is_forced(ended[0])
        return Transaction(transaction_id, group or "", state, stored_us, decided_us, messages=shown, forced=forced)

    async def in_doubt(self) -> InDoubt:
        parked = 0
        oldest: Pending | None = None
        for p in self.state.pending.by_id.values():  # the oldest first
            if p.parked:
                parked += 1
            elif oldest is None:
                oldest = p
        prepared = len(self.state.pending.by_id) - parked
        if oldest is None:
            return InDoubt(prepared, parked)
        return InDoubt(prepared, parked, oldest.stored_us, oldest.producer.group)

    async def undecided(
        self, state: State | None, producer_group: str | None, older_than_us: int | None, limit: int
    ) -> list[Transaction]:
        found = []
        for p in self.state.pending.by_id.values():
            mine = State.PARKED if p.parked else State.PREPARED
            if state is not None and mine != state:
                continue
            if producer_group is not None and p.producer.group != producer_group:
                continue
            if older_than_us is not None and p.stored_us > older_than_us:
                continue
            found.append(p)
            if len(found) >= limit:
                break
        shown = [self._transaction(p.id) for p in found]
        return [t for t in shown if t is not None]


def _expiry(row: tuple[Any, ...], payload: bytes, ttl_us: int) -> int:
    """When a message expires, 0 for never: by its topic's TTL or its own, whichever is shorter."""
    if row[1] & FLAG_TTL and payload:
        own_us = round(_decode_ttl(payload).ttl * 1_000_000)
        ttl_us = min(ttl_us, own_us) if ttl_us else own_us
    committed_us: int = row[4]
    return committed_us + ttl_us if ttl_us else 0
