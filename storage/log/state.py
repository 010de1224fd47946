"""The log's state in memory, and how it follows from the records: replay applies them, a checkpoint saves the result.

State here is small: what is undecided, delayed or unsettled, and numbers per queue. Messages stay in the log.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import msgspec

from notify.errors import NotFound
from storage.log.format import (
    ENTRY,
    ENTRY_HEAD,
    ENTRY_HEAD_SIZE,
    ENTRY_SIZE,
    FLAG_DELAY,
    RECORD_HEADER,
    RECORD_HEADER_SIZE,
    EntryKind,
    RecordType,
)
from storage.log.live import MISSING, LivePart, LiveRun
from storage.log.parts import Parts
from storage.log.pending import Pending, PendingMessage, PendingTable, Producer
from storage.log.queues import LogTopic, Queue, queue_key
from storage.progress import QueueProgress
from storage.store import Flush, Subscription

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode

_HALF, _QUEUE, _ROLLBACK, _DELAYED = EntryKind.HALF, EntryKind.QUEUE, EntryKind.ROLLBACK, EntryKind.DELAYED


class LogState:
    """Everything that replay rebuilds."""

    def __init__(self) -> None:
        self.topics: dict[str, LogTopic] = {}
        self.topics_by_id: dict[int, LogTopic] = {}
        self.last_topic_id = 0
        self.pending = PendingTable()
        self.delayed: list[tuple[int, bytes]] = []
        """Heap of (due, entry): committed, not due yet."""
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.progress: dict[tuple[str, int, int], QueueProgress] = {}
        self.paused: set[str] = set()
        self.producer_groups: list[str] = [""]
        """Producer groups by the number that entries carry; number 0 says nothing."""
        self.producer_numbers: dict[str, int] = {"": 0}
        self.moved: dict[int, int] = {}
        """Payloads that were carried out of a dropped segment: position as entries know it, to where it is now."""
        self.parts = Parts()
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
        for kind, _flags, entries, _data in records(body):
            self._index(part, entries, kind, count_offsets=False)

    def apply(self, part: LivePart, body: memoryview, time_us: int) -> None:
        """Do again what a frame's records did."""
        for kind, _flags, entries, data in records(body):
            self._index(part, entries, kind, count_offsets=True)
            if kind == RecordType.HALF:
                self._apply_half(entries, data)
            elif kind == RecordType.OUTCOME:
                self._apply_outcome(entries)
            elif kind == RecordType.MESSAGE:
                self._apply_delayed(entries)
            elif kind == RecordType.RELEASE:
                self._apply_release(entries)
            elif kind == RecordType.PROGRESS:
                self._apply_progress(decode(bytes(data)))
            elif kind == RecordType.DEAD_LETTER:
                size = int.from_bytes(data[:4], "little")
                for progress in decode(bytes(data[4 : 4 + size])):
                    self._apply_progress(progress)
            elif kind == RecordType.META:
                self._apply_meta(decode(bytes(data)))
            elif kind == RecordType.CHECK:
                self._apply_check(decode(bytes(data)))
            elif kind == RecordType.CARRY:
                self._apply_carry(entries)

    def _index(self, part: LivePart, entries: memoryview, kind: int, count_offsets: bool) -> None:
        number = part.count
        part.entries += entries
        decides = kind in (RecordType.OUTCOME, RecordType.MESSAGE)
        runs = part.runs
        for at in range(0, len(entries), ENTRY_SIZE):
            entry_kind = entries[at]
            if entry_kind == _QUEUE:
                _, _, queue_no, topic_id, _, offset = ENTRY_HEAD.unpack_from(entries, at)
                key = queue_key(topic_id, queue_no)
                run = runs.get(key)
                if run is None:
                    run = runs[key] = LiveRun(offset)
                missing = offset - run.first - len(run.numbers)
                if missing > 0:  # a damaged frame held these
                    run.numbers.extend([MISSING] * missing)
                run.numbers.append(number)
                if count_offsets:
                    queue = self._known_topic(topic_id, queue_no).queues[queue_no]
                    queue.next_offset = queue.visible = offset + 1
            if decides:
                transaction_id = bytes(entries[at + 48 : at + 64])
                part.decided[transaction_id] = number << 1 | (entry_kind == _ROLLBACK)
            number += 1
        part.count = part.assigned = number

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
            return self.set_topic(topic_id, f"lost-topic-{topic_id}", queue + 1, 0)
        for number in range(len(topic.queues), queue + 1):
            topic.queues.append(Queue(topic, number))
        return topic

    def _apply_outcome(self, entries: memoryview) -> None:
        pop = self.pending.by_id.pop
        for at in range(0, len(entries), ENTRY_SIZE):
            pop(bytes(entries[at + 48 : at + 64]), None)
        self._apply_delayed(entries)

    def _apply_delayed(self, entries: memoryview) -> None:
        for at in range(0, len(entries), ENTRY_SIZE):
            if entries[at] == _DELAYED:
                entry = bytes(entries[at : at + ENTRY_SIZE])
                heapq.heappush(self.delayed, (due_of(entry), entry))

    def _apply_release(self, entries: memoryview) -> None:
        released = {bytes(entries[at + 24 : at + ENTRY_SIZE]) for at in range(0, len(entries), ENTRY_SIZE)}
        kept = [item for item in self.delayed if item[1][24:] not in released]
        heapq.heapify(kept)
        self.delayed = kept

    def _apply_progress(self, record: list[Any]) -> None:
        what, group, topic_id, queue, runs = record
        progress = self.group_progress(group, topic_id, queue)
        if what == "attempts":
            for offset, attempts in runs:
                progress.attempts[offset] = attempts
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
            self.set_topic(*record[1:])
        elif what == "delete_topic":
            self.drop_topic(record[1])
        elif what == "subscribe":
            subscription = msgspec.convert(record[1], Subscription)
            if subscription.topic in self.topics:  # else damage took the topic's own record
                self.set_subscription(subscription, record[2])
        elif what == "unsubscribe":
            self.drop_subscription(record[1], record[2])
        elif what == "pause":
            self.set_paused(record[1], record[2])
        elif what == "producer_group":
            self.set_producer_group(record[1], record[2])

    # --- changes that replay and the running store share ------------------------------------------------------

    def set_topic(self, topic_id: int, name: str, queues: int, retention_us: int, flush: int = Flush.SYNC) -> LogTopic:
        topic = self.topics.get(name)
        if topic is None:
            topic = LogTopic(topic_id, name, queues, retention_us)
            self.topics[name] = self.topics_by_id[topic_id] = topic
            self.last_topic_id = max(self.last_topic_id, topic_id)
        topic.retention_us = retention_us
        topic.flush = Flush(flush)
        for number in range(len(topic.queues), queues):
            topic.queues.append(Queue(topic, number))
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
        number = int.from_bytes(entry[38:40], "little")
        return self.producer_groups[number] or None if number < len(self.producer_groups) else None

    # --- checkpoint -------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values."""
        producers: dict[int, int] = {}
        producer_rows: list[list[str]] = []
        pending_rows: list[list[Any]] = []
        for p in self.pending.by_id.values():
            number = producers.get(id(p.producer))
            if number is None:
                number = producers[id(p.producer)] = len(producer_rows)
                producer_rows.append([p.producer.group, p.producer.source, p.producer.instance])
            entries = [[m.topic.id, m.queue, m.flags, m.deliver_us, m.tail] for m in p.messages]
            pending_rows.append([p.id, number, p.stored_us, p.next_check_us, p.attempts, p.parked, entries])
        return {
            "topics": [
                [
                    *(t.id, t.name, len(t.queues), t.retention_us, int(t.flush), t.deleted),
                    [[q.next_offset, q.start] for q in t.queues],
                ]
                for t in self.topics_by_id.values()
            ],
            "paused": sorted(self.paused),
            "producer_groups": self.producer_groups,
            "subscriptions": [msgspec.to_builtins(s) for s in self.subscriptions.values()],
            "progress": [[*key, p.floor, p.runs(), list(p.attempts.items())] for key, p in self.progress.items()],
            "producers": producer_rows,
            "pending": pending_rows,
            "delayed": [[due, entry] for due, entry in self.delayed],
            "moved": list(self.moved.items()),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over a snapshot."""
        for topic_id, name, queues, retention_us, flush, deleted, offsets in saved["topics"]:
            topic = LogTopic(topic_id, name, queues, retention_us, Flush(flush))
            topic.deleted = deleted
            for queue, (next_offset, start) in zip(topic.queues, offsets, strict=True):
                queue.next_offset = queue.visible = next_offset
                queue.start = start
            self.topics_by_id[topic_id] = topic
            if not deleted:
                self.topics[name] = topic
            self.last_topic_id = max(self.last_topic_id, topic_id)
        self.paused = set(saved["paused"])
        for number, name in enumerate(saved["producer_groups"]):
            self.set_producer_group(number, name)
        for row in saved["subscriptions"]:
            subscription = msgspec.convert(row, Subscription)
            self.subscriptions[(subscription.group, subscription.topic)] = subscription
        for group, topic_id, queue_no, floor, runs, attempts in saved["progress"]:
            progress = self.group_progress(group, topic_id, queue_no)
            progress.floor = floor
            progress.attempts = dict(attempts)
            for first, count in runs:
                progress.settled.update(range(first, first + count))
        producers = [Producer(*row) for row in saved["producers"]]
        for transaction_id, number, stored_us, next_us, tries, parked, entries in saved["pending"]:
            messages = [PendingMessage(self.topics_by_id[e[0]], *e[1:]) for e in entries]
            pending = Pending(transaction_id, producers[number], messages, stored_us, next_us)
            pending.attempts, pending.parked = tries, parked
            self.pending.by_id[transaction_id] = pending
            self.pending.schedule(pending.producer.group, next_us, (transaction_id,))
        self.delayed = [(due, entry) for due, entry in saved["delayed"]]
        heapq.heapify(self.delayed)
        self.moved = dict(saved["moved"])


def due_of(entry: bytes) -> int:
    """When a DELAYED entry is due: a delay counts from its commit, an instant is taken as it is."""
    fields = ENTRY.unpack(entry)
    due: int = fields[10]
    return int(fields[4]) + due if fields[1] & FLAG_DELAY else due


def records(body: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """The records of a frame: (type, flags, entries, data)."""
    at = 0
    while at < len(body):
        length, kind, flags, count = RECORD_HEADER.unpack_from(body, at)
        data_at = at + RECORD_HEADER_SIZE + count * ENTRY_SIZE
        yield kind, flags, body[at + RECORD_HEADER_SIZE : data_at], body[data_at : at + length]
        at += length
