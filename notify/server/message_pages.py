"""Pages of a topic's messages, the newest first: the queues are read backwards from their ends and merged by time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from notify.errors import InvalidRequest
from notify.protocol.limits import LIMITS, digits
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

CHUNK = 16
"""Messages that are read at a time, so that large messages do not fill the memory."""


class Place(NamedTuple):
    """The last, oldest message of a page: the next page begins with the one before it."""

    committed_us: int
    queue: int
    offset: int

    @classmethod
    def of(cls, text: str) -> Place:
        """The place that `text` writes. Raises InvalidRequest if it is not one."""
        numbers = [n for part in text.split(".", 3) if (n := digits(part)) is not None]
        if len(numbers) != 3 or text.count(".") != 2:
            raise InvalidRequest("'before' must be the 'next' value of an earlier response", "invalid_query")
        return cls(*numbers)

    def __str__(self) -> str:
        return ".".join(map(str, self))


def page(
    store: Store, topic: str, queues: int, from_us: int, until_us: int, before: Place | None, most: int
) -> tuple[list[StoredMessage], Place | None]:
    """At most `most` messages committed in [from, until), the newest first, and `before` for the next page."""
    ends = [_end(store, topic, queue, until_us, before) for queue in range(queues)]
    tails = [backwards(store, topic, queue, end, from_us) for queue, end in enumerate(ends)]
    messages: list[StoredMessage] = []
    size = 0
    merged = heapq.merge(*tails, key=_place_of, reverse=True)
    for m in merged:
        if len(messages) == most or size > LIMITS.reply_bytes:
            return messages, _place_of(messages[-1])
        messages.append(m)
        size += len(m.payload)
    return messages, None


def _place_of(m: StoredMessage) -> Place:
    return Place(m.committed_us, m.queue, m.offset)


def _end(store: Store, topic: str, queue: int, until_us: int, before: Place | None) -> int:
    """The offset after the newest message of a queue that the page may have."""
    end = store.offset_at(topic, queue, until_us)
    if before is None:
        return end
    if queue == before.queue:
        return min(end, before.offset)
    # Messages of the same time are in the order of their queues, the highest first: lower queues still come.
    return min(end, store.offset_at(topic, queue, before.committed_us + (queue < before.queue)))


def backwards(store: Store, topic: str, queue: int, end: int, from_us: int = 0) -> Iterator[StoredMessage]:
    """The messages of a queue before the offset `end` and since a time, the newest first, without damaged ones."""
    start, last = store.bounds(topic, queue)
    end = min(end, last)
    while end > start:
        first = _back(store, topic, queue, start, end)
        chunk = store.read(topic, queue, first, CHUNK, CHUNK * (LIMITS.message_bytes + LIMITS.reply_bytes))
        for m in reversed([m for m in chunk if m.offset < end]):
            if m.committed_us < from_us:
                return
            if not m.corrupt:
                yield m
        end = first


def _back(store: Store, topic: str, queue: int, start: int, end: int) -> int:
    """The offset of the CHUNK-th message before `end`, or of the first message; offsets have gaps."""
    low, high = start, end - 1
    if end - start > CHUNK and store.count(topic, queue, end - CHUNK, end) == CHUNK:
        return end - CHUNK  # without gaps, as in most queues
    while low < high:
        middle = (low + high + 1) // 2
        if store.count(topic, queue, middle, end) >= CHUNK:
            low = middle
        else:
            high = middle - 1
    return low
