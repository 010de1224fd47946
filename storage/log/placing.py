"""The place of a committed message: in its queue, or among the delayed ones."""

from __future__ import annotations

from notify.storage.log.entry import ENTRY_HEAD, FLAG_FORCED, FLAG_TTL, Entry, EntryKind, Fixed
from notify.storage.log.frame import Frame
from notify.storage.log.pending import PendingMessage
from notify.storage.log.queues import Queue
from notify.storage.log.state import LogState

_QUEUE, _DELAYED = int(EntryKind.QUEUE), int(EntryKind.DELAYED)


def place(
    state: LogState, frame: Frame, message: PendingMessage, now_us: int, number: int
) -> tuple[bytes, Queue | None]:
    """The entry of a message that is committed now, the one of this number in the open frame; and its queue."""
    topic = message.topic
    if message.deliver_us:
        entry = ENTRY_HEAD.pack(_DELAYED, message.flags, message.queue, topic.id, now_us, 0) + message.tail
        due_us = Entry.of(entry).due_us
        times = state.times
        # A message due later than the last release may wait; a clock that was set back must not hide it behind one.
        if due_us > max(now_us, times.released[0]):
            position = Fixed.of(message.tail).position
            times.add(due_us, position, entry)
            frame.delayed.append((due_us, position, number))
            return entry, None
    queue = topic.queue_now(message.queue, message.tail) if topic.grown else topic.queues[message.queue]
    offset = queue.next_offset
    queue.next_offset = offset + 1
    flags = message.flags & (FLAG_TTL | FLAG_FORCED)
    return ENTRY_HEAD.pack(_QUEUE, flags, queue.number, topic.id, now_us, offset) + message.tail, queue
