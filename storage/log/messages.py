"""The queue role of the log: topics, reading, delayed messages, groups and their progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from notify.errors import InvalidRequest, NotFound
from storage.hashing import key_hash
from storage.log.format import (
    ENTRY,
    ENTRY_HEAD,
    ENTRY_HEAD_SIZE,
    ENTRY_SIZE,
    ENTRY_TAIL,
    FLAG_TTL,
    RECORD_HEADER_SIZE,
    RELEASED,
    EntryKind,
    RecordType,
    crc32c,
)
from storage.log.journal import Journal
from storage.log.parts import Part
from storage.log.queues import Policy, Queue
from storage.log.sealed import ENTRY_TYPE, SealedPart
from storage.log.segments import Segments
from storage.log.state import LogState, encode
from storage.progress import QueueProgress
from storage.store import (
    Priorities,
    SettleKind,
    State,
    StoredMessage,
    Subscription,
    Topic,
    Transaction,
    dead_letter_topic,
)

READ_AHEAD_BYTES = 1 << 20
READ_GAP_BYTES = 16 << 10
"""Between two payloads of one read: copying so much costs as much as another call to the system."""
PLACES = 4096
"""How many readers' places are remembered, at most: where a queue's next entries lie."""


class _Ttl(msgspec.Struct):
    """What of a payload says when it expires."""

    ttl: float = 0


_decode_ttl = msgspec.msgpack.Decoder(_Ttl).decode


class LogQueues:
    """Mixed into LogStore."""

    state: LogState
    journal: Journal
    segments: Segments
    corrupt_messages: int
    _places: dict[tuple[int, int], Part]
    """(queue, offset) to the part in which a reader that went on from there will find its entries."""

    # --- topics -----------------------------------------------------------------------------------------------

    def topics(self) -> list[Topic]:
        return [t.described() for t in self.state.topics.values()]

    def topic(self, name: str) -> Topic | None:
        t = self.state.topics.get(name)
        return None if t is None else t.described()

    def has_topic(self, name: str) -> bool:
        return name in self.state.topics

    async def create_topic(self, topic: Topic) -> Topic:
        self.create_topic_soon(topic)
        await self.journal.sync()
        return topic

    def create_topic_soon(self, topic: Topic) -> None:
        known = self.state.topics.get(topic.name)
        if known is not None and topic.queues < len(known.queues):
            raise InvalidRequest(
                f"topic {topic.name!r} has {len(known.queues)} queues; the number can grow, not shrink"
            )
        self.journal.reserve(1024)
        topic_id = known.id if known is not None else self.state.topics_by_id.last + 1
        policy = Policy.of(topic)
        self.state.set_topic(topic_id, topic.name, topic.queues, policy)
        self.journal.append(
            RecordType.META, 0, [], encode(("topic", topic_id, topic.name, topic.queues, *policy.record()))
        )

    async def delete_topic(self, name: str) -> None:
        if name not in self.state.topics:
            raise NotFound(f"there is no topic {name!r}")
        self.journal.reserve(1024)
        self.state.drop_topic(name)
        self.journal.append(RecordType.META, 0, [], encode(("delete_topic", name)))
        await self.journal.sync()

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        found = self.state.queue(topic, queue)
        return found.start, found.visible

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

    def trim(self, topic: str, queue: int, offset: int) -> None:
        found = self.state.queue(topic, queue)
        if offset <= found.start:
            return
        self.journal.reserve(256)
        found.start = min(offset, found.visible)
        self.journal.append(RecordType.META, 0, [], encode(("start", found.topic.id, queue, found.start)))

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
            queue = self.state.topics_by_id[row[3]].queues[row[2]]
            offset = queue.next_offset
            queue.next_offset = offset + 1
            head = ENTRY_HEAD.pack(EntryKind.QUEUE, row[1] & FLAG_TTL, row[2], row[3], now_us, offset)
            entries.append(head + entry[ENTRY_HEAD_SIZE:])
            queues.append(queue)
        opened = self.journal.open
        self.journal.append(RecordType.RELEASE, 0, entries, RELEASED.pack(*times.released))
        opened.entries += entries
        opened.queues += queues
        opened.part.assigned += len(entries)
        return len(entries)

    def next_due_us(self) -> int | None:
        return self.state.times.next_due_us()

    def delayed(self) -> int:
        return self.state.times.waiting()

    # --- groups -----------------------------------------------------------------------------------------------

    def subscriptions(self) -> list[Subscription]:
        return list(self.state.subscriptions.values())

    def subscription(self, group: str, topic: str) -> Subscription | None:
        return self.state.subscriptions.get((group, topic))

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        if subscription.topic not in self.state.topics:
            raise NotFound(f"there is no topic {subscription.topic!r}")
        self.journal.reserve(4096)
        moved = None if offsets is None else list(offsets)
        self.state.set_subscription(subscription, moved)
        record = encode(("subscribe", msgspec.to_builtins(subscription), moved))
        self.journal.append(RecordType.META, 0, [], record)

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        self.subscribe_soon(subscription, offsets)
        await self.journal.sync()
        return subscription

    async def unsubscribe(self, group: str, topic: str) -> None:
        if (group, topic) not in self.state.subscriptions:
            raise NotFound(f"group {group!r} has no subscription to {topic!r}")
        self.journal.reserve(1024)
        self.state.drop_subscription(group, topic)
        self.journal.append(RecordType.META, 0, [], encode(("unsubscribe", group, topic)))
        await self.journal.sync()

    def patterns(self) -> list[Subscription]:
        return list(self.state.patterns.values())

    async def set_pattern(self, subscription: Subscription) -> None:
        self.journal.reserve(4096)
        self.state.patterns[(subscription.group, subscription.topic)] = subscription
        self.journal.append(RecordType.META, 0, [], encode(("pattern", msgspec.to_builtins(subscription))))
        await self.journal.sync()

    async def drop_pattern(self, group: str, pattern: str) -> None:
        if (group, pattern) not in self.state.patterns:
            raise NotFound(f"group {group!r} does not subscribe to {pattern!r}")
        self.journal.reserve(1024)
        del self.state.patterns[(group, pattern)]
        self.journal.append(RecordType.META, 0, [], encode(("drop_pattern", group, pattern)))
        await self.journal.sync()

    def priorities(self, group: str) -> Priorities | None:
        return self.state.priorities.get(group)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        record = encode(("priorities", group, msgspec.to_builtins(priorities)))
        self.journal.reserve(len(record) + 512)
        self.state.priorities[group] = priorities
        self.journal.append(RecordType.META, 0, [], record)
        await self.journal.sync()

    async def pause(self, group: str, paused: bool) -> None:
        self.journal.reserve(512)
        self.state.set_paused(group, paused)
        self.journal.append(RecordType.META, 0, [], encode(("pause", group, paused)))
        await self.journal.sync()

    def paused(self) -> frozenset[str]:
        return frozenset(self.state.paused)

    def progress(self, group: str, topic: str, queue: int) -> QueueProgress:
        return self.state.group_progress(group, self.state.queue(topic, queue).topic.id, queue)

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        self.settle_soon(group, topic, queue, list(runs), kind)
        await self.journal.sync()

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        """Settle without waiting for the disk; `sync` waits for it and for everything before it."""
        found = self.state.queue(topic, queue)
        self.journal.reserve(256 + 24 * len(runs))
        progress = self.state.group_progress(group, found.topic.id, queue)
        for first, count in runs:
            progress.settle(first, count)
        record = encode((int(kind), group, found.topic.id, queue, runs))
        self.journal.append(RecordType.PROGRESS, 0, [], record)

    async def sync(self) -> None:
        """Wait until everything so far is durable."""
        await self.journal.sync()

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, int, int]]) -> None:
        found = self.state.queue(topic, queue)
        self.journal.reserve(256 + 32 * len(offsets))
        self.state.group_progress(group, found.topic.id, queue).again(offsets)
        record = encode(("attempts", group, found.topic.id, queue, list(offsets)))
        self.journal.append(RecordType.PROGRESS, 0, [], record)

    async def dead_letter(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        name = dead_letter_topic(group)
        if name not in self.state.topics:
            await self.create_topic(Topic(name))
        queue = self.state.topics[name].queues[0]
        self.journal.reserve(4096 + sum(len(payload) + 256 for _, payload in messages))
        settled = []
        for message, _ in messages:
            source = self.state.queue(message.topic, message.queue)
            self.state.group_progress(group, source.topic.id, message.queue).settle(message.offset, 1)
            run = (message.offset, 1)
            settled.append((int(SettleKind.DEAD_LETTER), group, source.topic.id, message.queue, (run,)))
        meta = encode(settled)
        position = self.journal.end + RECORD_HEADER_SIZE + len(messages) * ENTRY_SIZE + 4 + len(meta)
        entries = []
        for message, payload in messages:
            offset = queue.next_offset
            queue.next_offset = offset + 1
            head = ENTRY_HEAD.pack(EntryKind.QUEUE, 0, 0, queue.topic.id, now_us, offset)
            tail = ENTRY_TAIL.pack(
                position,
                len(payload),
                message.message_no,
                0,
                0,
                message.transaction_id,
                message.tag_hash,
                crc32c(payload),
                0,
            )
            position += len(payload)
            entries.append(head + tail)
        opened = self.journal.open
        data = len(meta).to_bytes(4, "little") + meta + b"".join([payload for _, payload in messages])
        self.journal.append(RecordType.DEAD_LETTER, 0, entries, data)
        opened.entries += entries
        opened.queues += [queue] * len(entries)
        opened.part.assigned += len(entries)
        opened.points.add("dead_letter")
        await self.journal.sync()

    def entries_of(self, transaction_id: bytes) -> list[bytes]:
        """Every entry of a transaction in log order, those on their way to the disk included."""
        parts = reversed(list(self.state.parts.holding(transaction_id)))
        found = [entry for part in parts for entry in part.lookup(transaction_id)]
        for frame in (self.journal.in_flight, self.journal.open):
            if frame is not None:
                found += [entry for entry in frame.entries if entry[48:64] == transaction_id]
        return found

    # --- for the administrator --------------------------------------------------------------------------------

    def transaction(self, transaction_id: bytes) -> Transaction | None:
        pending = self.state.pending.by_id.get(transaction_id)
        entries = self.entries_of(transaction_id)
        stored = [e for e in entries if e[0] == EntryKind.HALF]
        ended = [e for e in entries if e[0] not in (EntryKind.HALF, EntryKind.CARRY)]
        shown = [self._one(e) for e in (ended or stored)]
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
        return Transaction(transaction_id, group or "", state, stored_us, decided_us, messages=shown)

    def undecided(
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
        shown = [self.transaction(p.id) for p in found]
        return [t for t in shown if t is not None]


def _expiry(row: tuple[Any, ...], payload: bytes, ttl_us: int) -> int:
    """When a message expires, 0 for never: by its topic's TTL or its own, whichever is shorter."""
    if row[1] & FLAG_TTL and payload:
        own_us = round(_decode_ttl(payload).ttl * 1_000_000)
        ttl_us = min(ttl_us, own_us) if ttl_us else own_us
    committed_us: int = row[4]
    return committed_us + ttl_us if ttl_us else 0
