"""The log's state in memory, and how it follows from the records: replay applies them, a checkpoint saves the result.

State here is small: what is undecided or unsettled, and numbers per queue. Messages, delayed ones too, stay in the
log.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from notify.errors import NotFound
from notify.storage.bridged import BridgeState
from notify.storage.groups import Priorities, Subscription
from notify.storage.log.format import (
    ENTRY,
    ENTRY_HEAD_SIZE,
    ENTRY_SIZE,
    FLAG_DELAY,
    RECORD_HEADER,
    RECORD_HEADER_SIZE,
    RELEASED,
    EntryKind,
    RecordType,
)
from notify.storage.log.live import LivePart
from notify.storage.log.parts import Parts
from notify.storage.log.pending import Pending, PendingMessage, PendingTable, Producer
from notify.storage.log.queues import LogTopic, Queue, TopicsById
from notify.storage.log.sealed import ENTRY_TYPE
from notify.storage.log.times import TimeIndex
from notify.storage.progress import QueueProgress

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


class LogState:
    """Everything that replay rebuilds."""

    def __init__(self) -> None:
        self.topics: dict[str, LogTopic] = {}
        self.topics_by_id = TopicsById()
        self.pending = PendingTable()
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.patterns: dict[tuple[str, str], Subscription] = {}
        """Subscriptions that begin as soon as a topic of a matching name is made."""
        self.priorities: dict[str, Priorities] = {}
        self.progress: dict[tuple[str, int, int], QueueProgress] = {}
        self.paused: set[str] = set()
        self.bridges: dict[str, BridgeState] = {}
        self.producer_groups: list[str] = [""]
        """Producer groups by the number that entries carry; number 0 says nothing."""
        self.producer_numbers: dict[str, int] = {"": 0}
        self.moved: dict[int, int] = {}
        """Payloads that were carried out of a dropped segment: position as entries know it, to where it is now."""
        self.parts = Parts()
        self.times = TimeIndex(self.parts)
        self.being_sealed: list[LivePart] = []
        """Live parts before the last: full, and being written as sealed ones."""
        self.sealed_id_max = 0
        """First 8 bytes of the highest id in a sealed part: what is above is in none."""

    @property
    def live(self) -> LivePart:
        part = self.parts[-1]
        assert isinstance(part, LivePart)
        return part

    def queue(self, topic: str, number: int) -> Queue:
        found = self.topics.get(topic)
        if found is None or not 0 <= number < len(found.queues):
            raise NotFound(f"there is no queue {number} of topic {topic!r}")
        return found.queues[number]

    def group_progress(self, group: str, topic_id: int, queue: int) -> QueueProgress:
        key = (group, topic_id, queue)
        progress = self.progress.get(key)
        if progress is None:
            progress = self.progress[key] = QueueProgress()
        return progress

    def move_starts(self, queues: Sequence[Queue]) -> None:
        """Parts are gone: these queues begin where what is left of them begins."""
        firsts = self.parts.first_offsets(np.array([queue.key for queue in queues], np.uint64))
        for queue, first in zip(queues, firsts.tolist(), strict=True):
            queue.start = max(queue.start, first if first >= 0 else queue.visible)

    def outcome(self, transaction_id: bytes) -> bool | None:
        """True committed, False rolled back, None not decided as far as is retained."""
        for part in self.parts.holding(transaction_id):
            outcome = part.outcome(transaction_id)
            if outcome is not None:
                return outcome
        return None

    # --- replay -----------------------------------------------------------------------------------------------

    def index_only(self, part: LivePart, body: memoryview) -> None:
        """Add a frame's entries to a live part whose state a checkpoint has given already."""
        for _kind, _flags, entries, _data in records(body):
            part.entries += entries

    def apply(self, part: LivePart, body: memoryview) -> None:
        """Do again what a frame's records did; `indexed` follows when the part's frames are through."""
        for kind, _flags, entries, data in records(body):
            part.entries += entries
            if kind == RecordType.HALF:
                self._apply_half(entries, data)
            elif kind == RecordType.OUTCOME:
                self._apply_outcome(entries)
            elif kind == RecordType.RELEASE:
                self.times.released = max(self.times.released, RELEASED.unpack(data))
            elif kind in (RecordType.PROGRESS, RecordType.DEAD_LETTER):
                for progress in progress_of(kind, data):
                    self._apply_progress(progress)
            elif kind == RecordType.META:
                self._apply_meta(decode(bytes(data)))
            elif kind == RecordType.CHECK:
                self._apply_check(decode(bytes(data)))
            elif kind == RecordType.CARRY:
                self._apply_carry(entries)

    def indexed(self, part: LivePart, applied_from: int) -> None:
        """Make the part's index, and count the offsets of its entries from number `applied_from` on."""
        part.index()
        table = np.frombuffer(part.entries, ENTRY_TYPE)[applied_from:]
        table = table[table["kind"] == EntryKind.QUEUE]
        keys = (table["topic"].astype(np.uint64) << np.uint64(16)) | table["queue"]
        # Offsets rise in log order: of each queue the last one counts.
        found, from_the_end = np.unique(keys[::-1], return_index=True)
        ends = table["offset"][::-1][from_the_end]
        for key, end in zip(found.tolist(), ends.tolist(), strict=True):
            queue = self._known_topic(key >> 16, key & 0xFFFF).queues[key & 0xFFFF]
            queue.next_offset = queue.visible = end + 1

    def _apply_half(self, entries: memoryview, data: memoryview) -> None:
        size = int.from_bytes(data[:2], "little")
        group, source, instance, check_after_us = decode(bytes(data[2 : 2 + size]))
        producer = Producer(group, source, instance)
        batch: list[bytes] = []
        due_us = 0
        for at in range(0, len(entries), ENTRY_SIZE):
            entry = bytes(entries[at : at + ENTRY_SIZE])
            transaction_id = entry[48:64]
            pending = self.pending.by_id.get(transaction_id)
            if pending is None:
                time_us = int.from_bytes(entry[8:16], "little")
                due_us = time_us + check_after_us
                pending = Pending(transaction_id, producer, [], time_us, due_us)
                self.pending.by_id[transaction_id] = pending
                batch.append(transaction_id)
            pending.messages.append(self._pending_message(entry))
        self.pending.schedule(group, due_us, batch)

    def _pending_message(self, entry: bytes) -> PendingMessage:
        fields = ENTRY.unpack(entry)
        topic = self._known_topic(fields[3], fields[2])
        return PendingMessage(topic, fields[2], fields[1], fields[10], entry[ENTRY_HEAD_SIZE:])

    def _known_topic(self, topic_id: int, queue: int) -> LogTopic:
        """The topic of an entry. Where damage took the record that made it, its messages are kept under a number."""
        topic = self.topics_by_id.get(topic_id)
        if topic is None:
            return self.set_topic(topic_id, f"lost-topic-{topic_id}", queue + 1)
        topic.grow(queue + 1)
        return topic

    def _apply_outcome(self, entries: memoryview) -> None:
        pop = self.pending.by_id.pop
        for at in range(0, len(entries), ENTRY_SIZE):
            pop(bytes(entries[at + 48 : at + 64]), None)

    def _apply_progress(self, record: list[Any]) -> None:
        what, group, topic_id, queue, runs = record
        progress = self.group_progress(group, topic_id, queue)
        if what == "attempts":
            progress.again(runs)
        else:
            for first, count in runs:
                progress.settle(first, count)

    def _apply_check(self, record: list[Any]) -> None:
        transaction_id, attempts, parked, next_us = record
        pending = self.pending.by_id.get(transaction_id)
        if pending is not None:
            pending.attempts = attempts
            pending.parked = parked
            self.pending.reschedule(pending, next_us)

    def _apply_carry(self, entries: memoryview) -> None:
        """Live payloads of a dropped segment have a new place."""
        for at in range(0, len(entries), ENTRY_SIZE):
            fields = ENTRY.unpack_from(entries, at)
            self.moved[fields[5]] = fields[6]

    def _apply_meta(self, record: list[Any]) -> None:
        what = record[0]
        if what == "topic":
            topic_id, name, queues = record[1:4]
            self.set_topic(topic_id, name, queues).restore(record[4:])
        elif what == "start":
            topic = self.topics_by_id.get(record[1])
            if topic is not None and record[2] < len(topic.queues):
                topic.queues[record[2]].start = record[3]
        elif what == "delete_topic":
            self.drop_topic(record[1])
        elif what == "subscribe":
            subscription = msgspec.convert(record[1], Subscription)
            if subscription.topic in self.topics:  # else damage took the topic's own record
                self.set_subscription(subscription, record[2])
        elif what == "unsubscribe":
            self.drop_subscription(record[1], record[2])
        elif what == "pattern":
            pattern = msgspec.convert(record[1], Subscription)
            self.patterns[(pattern.group, pattern.topic)] = pattern
        elif what == "drop_pattern":
            self.patterns.pop((record[1], record[2]), None)
        elif what == "priorities":
            self.priorities[record[1]] = msgspec.convert(record[2], Priorities)
        elif what == "pause":
            self.set_paused(record[1], record[2])
        elif what == "producer_group":
            self.set_producer_group(record[1], record[2])
        elif what == "bridge":
            bridge = msgspec.convert(record[1], BridgeState)
            self.bridges[bridge.source] = bridge

    # --- changes that replay and the running store share ------------------------------------------------------

    def set_topic(self, topic_id: int, name: str, queues: int) -> LogTopic:
        """The topic of a name, made or grown as needed."""
        topic = self.topics.get(name)
        if topic is None:
            topic = LogTopic.numbered(topic_id, name, queues)
            self.topics[name] = self.topics_by_id[topic_id] = topic
        topic.grow(queues)
        return topic

    def drop_topic(self, name: str) -> None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            topic.deleted = True
            for key in [key for key in self.subscriptions if key[1] == name]:
                self.drop_subscription(*key)

    def set_subscription(self, subscription: Subscription, offsets: list[int] | None) -> None:
        self.subscriptions[(subscription.group, subscription.topic)] = subscription
        topic = self.topics[subscription.topic]
        if offsets is not None:
            for queue, offset in enumerate(offsets):
                self.progress[(subscription.group, topic.id, queue)] = QueueProgress(offset)

    def drop_subscription(self, group: str, topic: str) -> None:
        self.subscriptions.pop((group, topic), None)
        if not any(key[0] == group for key in self.subscriptions):
            self.paused.discard(group)
        for key in [key for key in self.progress if key[0] == group]:
            found = self.topics_by_id.get(key[1])
            if found is None or found.name == topic:
                del self.progress[key]

    def set_paused(self, group: str, paused: bool) -> None:
        if paused:
            self.paused.add(group)
        else:
            self.paused.discard(group)

    def set_producer_group(self, number: int, name: str) -> None:
        while len(self.producer_groups) <= number:  # damage took the records of some
            self.producer_groups.append("")
        self.producer_groups[number] = name
        self.producer_numbers[name] = number

    def producer_group_of(self, entry: bytes) -> str | None:
        """The producer group of an entry, None where it does not say."""
        return self._group_by_number(int.from_bytes(entry[38:40], "little"))

    def _group_by_number(self, number: int) -> str | None:
        return self.producer_groups[number] or None if number < len(self.producer_groups) else None

    def group_of(self, transaction_id: bytes) -> str | None:
        """The producer group of a transaction, None where it is not known or had none."""
        pending = self.pending.by_id.get(transaction_id)
        if pending is not None:
            return pending.producer.group or None
        for part in self.parts.holding(transaction_id):
            number = part.group_number(transaction_id)
            if number:
                return self._group_by_number(number)
        return None

    # --- checkpoint -------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The state as it is now; the function that is returned makes plain values of it, also in another thread.

        What is taken over here is a copy, or never changes, or is set again to the same by replaying what follows.
        """
        topics = self.topics_by_id.values()
        counts = [len(t.queues) for t in topics]
        records = [t.record() for t in topics]
        ends = array("Q", [q.next_offset for t in topics for q in t.queues])
        starts = array("Q", [q.start for t in topics for q in t.queues])
        progress = [
            (key, p.floor, p.settled.copy(), p.attempts.copy(), p.retry_at.copy()) for key, p in self.progress.items()
        ]
        pending = list(self.pending.by_id.values())
        plain = {
            "paused": sorted(self.paused),
            "bridges": [msgspec.to_builtins(b) for b in self.bridges.values()],
            "producer_groups": list(self.producer_groups),
            "subscriptions": [msgspec.to_builtins(s) for s in self.subscriptions.values()],
            "patterns": [msgspec.to_builtins(s) for s in self.patterns.values()],
            "priorities": {group: msgspec.to_builtins(p) for group, p in self.priorities.items()},
            "released": self.times.released,
        }
        moved = self.moved.copy()

        def values() -> dict[str, Any]:
            return {
                "topics": [
                    [t.id, t.name, n, t.deleted, *record] for t, n, record in zip(topics, counts, records, strict=True)
                ],
                "ends": _packed(ends),
                "starts": _packed(starts),
                "progress": [
                    [*key, floor, list(settled), list(attempts.items()), list(retry_at.items())]
                    for key, floor, settled, attempts, retry_at in progress
                ],
                **_pending_rows(pending),
                "moved": list(moved.items()),
                **plain,
            }

        return values

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over a snapshot."""
        ends, starts = iter(_unpacked(saved["ends"])), iter(_unpacked(saved["starts"]))
        for topic_id, name, queues, deleted, *record in saved["topics"]:
            topic = LogTopic.numbered(topic_id, name, queues)
            topic.restore(record)
            topic.deleted = deleted
            for queue in topic.queues:
                queue.next_offset = queue.visible = next(ends)
                queue.start = next(starts)
            self.topics_by_id[topic_id] = topic
            if not deleted:
                self.topics[name] = topic
        self.paused = set(saved["paused"])
        for row in saved.get("bridges", []):
            self.bridges[row["source"]] = msgspec.convert(row, BridgeState)
        for number, name in enumerate(saved["producer_groups"]):
            self.set_producer_group(number, name)
        for row in saved["subscriptions"]:
            subscription = msgspec.convert(row, Subscription)
            self.subscriptions[(subscription.group, subscription.topic)] = subscription
        for row in saved["patterns"]:
            pattern = msgspec.convert(row, Subscription)
            self.patterns[(pattern.group, pattern.topic)] = pattern
        for group, row in saved["priorities"].items():
            self.priorities[group] = msgspec.convert(row, Priorities)
        for group, topic_id, queue_no, floor, runs, attempts, retry_at in saved["progress"]:
            progress = self.group_progress(group, topic_id, queue_no)
            progress.floor = floor
            progress.attempts = dict(attempts)
            progress.retry_at = dict(retry_at)
            for first, count in runs:
                progress.settled.add(first, count)
        producers = [Producer(*row) for row in saved["producers"]]
        for transaction_id, number, stored_us, next_us, tries, parked, entries in saved["pending"]:
            messages = [PendingMessage(self.topics_by_id[e[0]], *e[1:]) for e in entries]
            pending = Pending(transaction_id, producers[number], messages, stored_us, next_us)
            pending.attempts, pending.parked = tries, parked
            self.pending.by_id[transaction_id] = pending
            self.pending.schedule(pending.producer.group, next_us, (transaction_id,))
        self.times.released = tuple(saved["released"])
        self.moved = dict(saved["moved"])


def _packed(numbers: array[int]) -> bytes:
    return np.frombuffer(numbers, np.uint64).astype("<u8").tobytes() if numbers else b""


def _unpacked(data: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(data, "<u8").tolist()
    return numbers


def _pending_rows(undecided: list[Pending]) -> dict[str, Any]:
    producers: dict[int, int] = {}
    producer_rows: list[list[str]] = []
    pending_rows: list[list[Any]] = []
    for p in undecided:
        number = producers.get(id(p.producer))
        if number is None:
            number = producers[id(p.producer)] = len(producer_rows)
            producer_rows.append([p.producer.group, p.producer.source, p.producer.instance])
        entries = [[m.topic.id, m.queue, m.flags, m.deliver_us, m.tail] for m in p.messages]
        pending_rows.append([p.id, number, p.stored_us, p.next_check_us, p.attempts, p.parked, entries])
    return {"producers": producer_rows, "pending": pending_rows}


def due_of(entry: bytes) -> int:
    """When a DELAYED entry is due: a delay counts from its commit, an instant is taken as it is."""
    fields = ENTRY.unpack(entry)
    due: int = fields[10]
    return int(fields[4]) + due if fields[1] & FLAG_DELAY else due


def progress_of(kind: int, data: memoryview) -> list[Any]:
    """The settlements in a record: (kind or "attempts", group, topic, queue, runs) each; empty for other records."""
    if kind == RecordType.PROGRESS:
        return [decode(bytes(data))]
    if kind == RecordType.DEAD_LETTER:
        size = int.from_bytes(data[:4], "little")
        return list(decode(bytes(data[4 : 4 + size])))
    return []


def records(body: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """The records of a frame: (type, flags, entries, data)."""
    at = 0
    while at < len(body):
        length, kind, flags, count = RECORD_HEADER.unpack_from(body, at)
        data_at = at + RECORD_HEADER_SIZE + count * ENTRY_SIZE
        yield kind, flags, body[at + RECORD_HEADER_SIZE : data_at], body[data_at : at + length]
        at += length
