"""Replays the log's records into the state, frame by frame."""

from __future__ import annotations

import numpy as np

from notify.storage.log import meta
from notify.storage.log.entry import Entry, EntryKind, each_of, queue_keys, table_of, transaction_ids_of
from notify.storage.log.open_part import OpenPart
from notify.storage.log.pending import Pending
from notify.storage.log.queues import LogTopic
from notify.storage.log.records import (
    ATTEMPTS,
    RELEASED,
    CheckAnswered,
    Held,
    RecordType,
    check_answered,
    progressed,
    records,
    sender_bytes,
    sender_of,
)
from notify.storage.log.state import LogState


class Replay:
    """Applies frames to one state."""

    def __init__(self, state: LogState) -> None:
        self._state = state

    def index_only(self, part: OpenPart, body: memoryview) -> None:
        """Add a frame's entries to an open part; the checkpoint already has the state."""
        for record in records(body):
            part.entries += record.entries

    def apply(self, part: OpenPart, body: memoryview) -> None:
        """Replay a frame's records. Call `indexed` after the part's last frame."""
        state = self._state
        for kind, entries, data in records(body):
            part.entries += entries
            if kind == RecordType.HALF:
                self._half(entries, data)
            elif kind == RecordType.OUTCOME:
                pop = state.pending.by_id.pop
                for transaction_id in transaction_ids_of(entries):
                    pop(transaction_id, None)
                self._withdrawals(entries)
            elif kind == RecordType.MESSAGE:
                self._withdrawals(entries)
            elif kind == RecordType.RELEASE:
                state.times.released = max(state.times.released, RELEASED.unpack(data))
            elif kind in (RecordType.PROGRESS, RecordType.DEAD_LETTER):
                for progress in progressed(kind, data):
                    self._progress(progress)
            elif kind == RecordType.META:
                self._meta(meta.decoded(data))
            elif kind == RecordType.CHECK:
                self._check(check_answered(data))
            elif kind == RecordType.CARRY:
                for entry in each_of(entries):
                    carried = Entry.of(entry)
                    state.moved[carried.offset] = carried.position  # its offset is the old position

    def indexed(self, part: OpenPart, applied_from: int) -> None:
        """Build the part's index, and advance the queues by its entries from number `applied_from` on."""
        part.index()
        table = table_of(part.entries)[applied_from:]
        table = table[table["kind"] == EntryKind.QUEUE]
        keys = queue_keys(table)
        # Offsets rise in log order, so the last one of each queue counts.
        last_keys, from_the_end = np.unique(keys[::-1], return_index=True)
        ends = table["offset"][::-1][from_the_end]
        for key, end in zip(last_keys.tolist(), ends.tolist(), strict=True):
            queue = self._known_topic(key >> 16, key & 0xFFFF).queues[key & 0xFFFF]
            queue.next_offset = queue.visible = end + 1

    def _half(self, entries: memoryview, data: memoryview) -> None:
        sender = sender_of(sender_bytes(data))
        by_id = self._state.pending.by_id
        batch: list[bytes] = []
        due_us = 0
        for raw in each_of(entries):
            entry = Entry.of(raw)
            transaction_id, time_us = entry.transaction_id, entry.time_us
            pending = by_id.get(transaction_id)
            if pending is None:
                due_us = time_us + sender.check_after_us
                pending = by_id[transaction_id] = Pending(transaction_id, sender, [], time_us, due_us)
                batch.append(transaction_id)
            self._known_topic(entry.topic, entry.queue)
            pending.entries.append(raw)
        self._state.pending.schedule(sender.group, due_us, batch)

    def _withdrawals(self, entries: memoryview) -> None:
        state = self._state
        if not state.withdrawals.are_none:
            state.withdrawals.replay(entries, state.pending.by_id)
        if state.dedupes.asked:
            state.dedupes.replay(entries, state.times.released)

    def _known_topic(self, number: int, queue: int) -> LogTopic:
        """The topic of an entry. If damage took the topic's record, its messages are kept under its number."""
        topic = self._state.topics_by_id.get(number)
        if topic is None:
            return self._state.set_topic(number, f"lost-topic-{number}", queue + 1)
        topic.grow(queue + 1)
        return topic

    def _progress(self, record: Held) -> None:
        progress = self._state.group_progress(record.group, record.topic, record.queue)
        if record.what == ATTEMPTS:
            progress.again(record.runs, record.reasons)
        else:
            for first, count in record.runs:
                progress.settle(first, count)

    def _check(self, answer: CheckAnswered) -> None:
        pending = self._state.pending.by_id.get(answer.id)
        if pending is not None:
            pending.attempts = answer.attempts
            pending.parked = answer.parked
            self._state.pending.reschedule(pending, answer.next_check_us)

    def _meta(self, record: meta.Meta | None) -> None:
        state = self._state
        match record:
            case meta.TopicSet():
                topic = state.set_topic(record.number, record.name, record.queues)
                topic.restore(record.retention_us, record.flush, record.more)
            case meta.StartSet():
                known = state.topics_by_id.get(record.topic)
                if known is not None and record.queue < len(known.queues):
                    known.queues[record.queue].start = record.offset
            case meta.TopicDeleted():
                state.drop_topic(record.name)
            case meta.Subscribed():
                if record.subscription.topic in state.topics:  # otherwise damage took the topic's own record
                    state.set_subscription(record.subscription, record.offsets)
            case meta.Unsubscribed():
                state.drop_subscription(record.group, record.topic)
            case meta.PatternSet(pattern):
                state.patterns[(pattern.group, pattern.topic)] = pattern
            case meta.PatternDropped():
                state.patterns.pop((record.group, record.pattern), None)
            case meta.PrioritiesSet():
                state.priorities[record.group] = record.priorities
            case meta.PauseSet():
                state.set_paused(record.group, record.paused)
            case meta.ProducerGroupNumbered():
                state.set_producer_group(record.number, record.name)
            case meta.BridgeMoved(bridge):
                state.bridges[bridge.source] = bridge
            case meta.BridgeBased():
                state.bridge_bases[record.source] = record.base
            case meta.Restored():
                state.begin_generation(record.generation)
            case meta.Withdraws():
                state.withdrawals.asked.ask(record.id, record.message_no, record.wanted)
            case meta.Dedupes():
                state.dedupes.asked.ask(record.id, record.message_no, record.dedupe)
            case None:
                return  # written by a newer version
