"""The places of committed messages: in its queue, or among the delayed ones."""

from __future__ import annotations

from collections.abc import Iterable

from notify.storage.log.entry import (
    ENTRY_HEAD,
    ENTRY_HEAD_SIZE,
    FLAG_FORCED,
    FLAG_TTL,
    HALF,
    Entry,
    EntryKind,
    Fixed,
)
from notify.storage.log.frame import Frame
from notify.storage.log.queues import Queue
from notify.storage.log.state import LogState

_QUEUE, _DELAYED = int(EntryKind.QUEUE), int(EntryKind.DELAYED)


def place(
    state: LogState,
    frame: Frame,
    halves: Iterable[bytes],
    now_us: int,
    entries: list[bytes],
    queues: list[Queue | None],
    forced: bool = False,
) -> None:
    """Give messages that are committed now their places, and add their entries to those of the next record.

    `halves`: their entries as halves. `entries`, `queues`: the record's entries, and of each the queue, None where the
    message is delayed. `forced`: an administrator decided the transactions.
    """
    before = len(frame.entries)
    first = before + len(entries)
    topics, times = state.topics_by_id.rows, state.times
    for half in halves:
        flags, queue_no, topic_id, deliver_us = HALF.unpack_from(half)
        if forced:
            flags |= FLAG_FORCED
        tail = half[ENTRY_HEAD_SIZE:]
        if deliver_us:
            entry = ENTRY_HEAD.pack(_DELAYED, flags, queue_no, topic_id, now_us, 0) + tail
            due_us = Entry.of(entry).due_us
            # A message due later than the last release may wait; a clock that was set back must not hide it behind one.
            if due_us > max(now_us, times.released[0]):
                position = Fixed.of(tail).position
                times.add(due_us, position, entry)
                frame.delayed.append((due_us, position, before + len(entries)))
                entries.append(entry)
                queues.append(None)
                continue
        topic = topics[topic_id]
        assert topic is not None  # a topic that was deleted keeps its row
        queue = topic.queue_now(queue_no, tail) if topic.grown else topic.queues[queue_no]
        offset = queue.next_offset
        queue.next_offset = offset + 1
        flags &= FLAG_TTL | FLAG_FORCED
        entries.append(ENTRY_HEAD.pack(_QUEUE, flags, queue.number, topic_id, now_us, offset) + tail)
        queues.append(queue)
    if before + len(entries) > first:
        frame.commits.append((now_us, first, before + len(entries)))
