"""The newest messages of a topic first, a page at a time: queues are read from their ends, and merged by time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from notify.errors import InvalidRequest
from notify.limits import LIMITS
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

CHUNK = 16
"""Messages that are read at a time, so that a few large ones do not make a reply of gigabytes."""


class Place(NamedTuple):
    """The last message of a page: the next page goes on behind it, towards older ones."""

    committed_us: int
    queue: int
    offset: int

    @classmethod
    def of(cls, text: str) -> Place:
        """Raises InvalidRequest for what no page ended with."""
        parts = text.split(".")
        if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 20 for p in parts):
            raise InvalidRequest("before is the `next` of an earlier answer", "invalid_query")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return ".".join(map(str, self))


def page(
    store: Store, topic: str, queues: int, from_us: int, until_us: int, before: Place | None, most: int
) -> tuple[list[StoredMessage], Place | None]:
    """At most `most` messages committed in [from, until), the newest first, and where the next page goes on."""
    ends = [_end(store, topic, queue, until_us, before) for queue in range(queues)]
    tails = [backwards(store, topic, queue, end, from_us) for queue, end in enumerate(ends)]
    found: list[StoredMessage] = []
    size = 0
    merged = heapq.merge(*tails, key=_place_of, reverse=True)
    for m in merged:
        if len(found) == most or size > LIMITS.reply_bytes:
            return found, _place_of(found[-1])
        found.append(m)
        size += len(m.payload)
    return found, None


def _place_of(m: StoredMessage) -> Place:
    return Place(m.committed_us, m.queue, m.offset)


def _end(store: Store, topic: str, queue: int, until_us: int, before: Place | None) -> int:
    """The offset behind the newest message of a queue that the page may have."""
    end = store.offset_at(topic, queue, until_us)
    if before is None:
        return end
    if queue == before.queue:
        return min(end, before.offset)
    # Messages of one time go by their queue: those of lower queues are still to come.
    return min(end, store.offset_at(topic, queue, before.committed_us + (queue < before.queue)))


def backwards(store: Store, topic: str, queue: int, end: int, from_us: int = 0) -> Iterator[StoredMessage]:
    """The messages of a queue before an offset and since a time, the newest first; damaged ones are left out."""
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
    """The offset from which on there are CHUNK messages before `end`, or all of them; offsets have gaps."""
    low, high = start, end - 1
    while low < high:
        middle = (low + high + 1) // 2
        if store.count(topic, queue, middle, end) >= CHUNK:
            low = middle
        else:
            high = middle - 1
    return low
