"""The place of a committed message: in its queue, or among the delayed ones."""

from __future__ import annotations

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
    state: LogState, frame: Frame, half: bytes, now_us: int, number: int, forced: bool = False
) -> tuple[bytes, Queue | None]:
    """The entry of a message that is committed now, made of its half's; and its queue, None where it is delayed.

    It will be the one of this number in the open frame. `forced`: an administrator decided the transaction.
    """
    flags, queue_no, topic_id, deliver_us = HALF.unpack_from(half)
    if forced:
        flags |= FLAG_FORCED
    tail = half[ENTRY_HEAD_SIZE:]
    if deliver_us:
        entry = ENTRY_HEAD.pack(_DELAYED, flags, queue_no, topic_id, now_us, 0) + tail
        due_us = Entry.of(entry).due_us
        times = state.times
        # A message due later than the last release may wait; a clock that was set back must not hide it behind one.
        if due_us > max(now_us, times.released[0]):
            position = Fixed.of(tail).position
            times.add(due_us, position, entry)
            frame.delayed.append((due_us, position, number))
            return entry, None
    topic = state.topics_by_id[topic_id]
    queue = topic.queue_now(queue_no, tail) if topic.grown else topic.queues[queue_no]
    offset = queue.next_offset
    queue.next_offset = offset + 1
    return ENTRY_HEAD.pack(
        _QUEUE, flags & (FLAG_TTL | FLAG_FORCED), queue.number, topic_id, now_us, offset
    ) + tail, queue
