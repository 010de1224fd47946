"""Topics and their queues, and delayed messages."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from notify.errors import InvalidRequest, NotFound
from notify.protocol.keys import key_hash, tag_hash
from notify.storage.memory.withdrawals import MemoryWithdrawals
from notify.storage.message_run import LEAST, MessageRun, run_of
from notify.storage.records import NewMessage, StoredMessage
from notify.storage.topics import Topic, with_growth


@dataclass(slots=True)
class _Queue:
    messages: list[StoredMessage] = field(default_factory=list)
    start: int = 0


class MemoryQueues:
    """A list for each queue."""

    def __init__(self) -> None:
        self._topics: dict[str, Topic] = {}
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._made = 0
        """How many topics were made, for their numbers."""
        self._turns: dict[str, int] = {}
        self._delayed: list[tuple[int, int, int, bytes, int, NewMessage]] = []
        """Heap of (due, number of the commit, number of the message, transaction id, queue, message)."""
        self.withdrawals = MemoryWithdrawals(self._place)
        self._commits = 0
        self._placed: dict[bytes, list[StoredMessage]] = {}
        """The queues and offsets of each transaction's messages."""
        self._visible: list[Callable[[set[str]], None]] = []
        self._placed_callbacks: list[Callable[[int, Mapping[str, int]], None]] = []

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        self._visible.append(callback)

    def on_placed(self, callback: Callable[[int, Mapping[str, int]], None]) -> None:
        self._placed_callbacks.append(callback)

    def payloads(self) -> Iterator[bytes]:
        """The payloads of all messages, in queues or delayed."""
        for queue in self._queues.values():
            yield from (message.payload for message in queue.messages[queue.start :])
        yield from (message.payload for *_, message in self._delayed)

    def forget_listeners(self) -> None:
        self._visible.clear()
        self._placed_callbacks.clear()

    def tell(self, topics: set[str]) -> None:
        """Inform the listeners of new messages in these topics."""
        if topics:
            for callback in self._visible:
                callback(topics)

    # --- topics -----------------------------------------------------------------------------------------------

    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    def topic(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def has_topic(self, name: str) -> bool:
        return name in self._topics

    def set_topic(self, topic: Topic) -> None:
        known = self._topics.get(topic.name)
        if known is not None and topic.queues < known.queues:
            raise InvalidRequest(f"topic {topic.name!r} has {known.queues} queues; the number can grow, not shrink")
        grown = known.grown if known is not None else ()
        if known is not None and topic.queues > known.queues:
            before = [self._queues[(topic.name, number)] for number in range(known.queues)]
            ends = tuple(len(queue.messages) for queue in before)
            grown = with_growth(topic.name, grown, ends, [queue.start for queue in before])
        if known is None:
            self._made += 1
        number = self._made if known is None else known.number
        self._topics[topic.name] = dataclasses.replace(topic, grown=grown, number=number)
        for queue_number in range(topic.queues):
            self._queues.setdefault((topic.name, queue_number), _Queue())

    def drop_topic(self, name: str) -> None:
        if self._topics.pop(name, None) is None:
            raise NotFound(f"there is no topic {name!r}")
        for key in [key for key in self._queues if key[0] == name]:
            del self._queues[key]

    # --- messages come ----------------------------------------------------------------------------------------

    def commit(self, transaction_id: bytes, messages: Sequence[NewMessage], now_us: int) -> set[str]:
        """Put a transaction's messages in their queues, or among the delayed ones; returns the topics of the former."""
        self._commits += 1
        touched: set[str] = set()
        for number, message in enumerate(messages):
            touched |= self.withdrawals.commit((transaction_id, number), message, now_us)
        return touched

    def _place(self, key: tuple[bytes, int], message: NewMessage, now_us: int) -> set[str]:
        transaction_id, number = key
        queue = self._queue_for(message)
        due_us = now_us + message.delay_us if message.delay_us else message.deliver_at_us
        if due_us > now_us:
            heapq.heappush(self._delayed, (due_us, self._commits, number, transaction_id, queue, message))
            self.withdrawals.delayed[key] = due_us, message.topic
            return set()
        self.enqueue(message, queue, transaction_id, number, now_us)
        for placed in self._placed_callbacks:
            placed(now_us, {message.topic: 1})
        return {message.topic}

    def _queue_for(self, message: NewMessage) -> int:
        count = self._topics[message.topic].queues
        if message.key is not None:
            return key_hash(message.key) % count
        self._turns[message.topic] = (self._turns.get(message.topic, 0) + 1) % count
        return self._turns[message.topic]

    def enqueue(self, message: NewMessage, queue: int, transaction_id: bytes, number: int, now_us: int) -> None:
        messages = self._queues[(message.topic, queue)].messages
        stored = StoredMessage(
            message.topic,
            queue,
            len(messages),
            transaction_id,
            number,
            now_us,
            message.payload,
            tag_hash(message.tag),
            key_hash=key_hash(message.key),
            expires_us=now_us + message.ttl_us if message.ttl_us else 0,
        )
        messages.append(stored)
        self._placed.setdefault(transaction_id, []).append(stored)

    def delayed(self) -> int:
        return len(self.withdrawals.delayed)

    def next_due_us(self) -> int | None:
        return self._delayed[0][0] if self._delayed else None

    def release_due(self, now_us: int, limit: int) -> int:
        released = 0
        touched: set[str] = set()
        while self._delayed and self._delayed[0][0] <= now_us and released < limit:
            _, _, number, transaction_id, queue, message = heapq.heappop(self._delayed)
            is_delayed = self.withdrawals.delayed.pop((transaction_id, number), None) is not None
            if is_delayed and message.topic in self._topics:
                queue = queue if message.key is None else self._queue_for(message)
                self.enqueue(message, queue, transaction_id, number, now_us)
                touched.add(message.topic)
            released += 1
        self.tell(touched)
        return released

    # --- messages are read ------------------------------------------------------------------------------------

    def _queue(self, topic: str, queue: int) -> _Queue:
        known = self._queues.get((topic, queue))
        if known is None:
            raise NotFound(f"there is no queue {queue} of topic {topic!r}")
        return known

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        where = self._queue(topic, queue)
        return where.start, len(where.messages)

    def count(self, topic: str, queue: int, first: int, end: int) -> int:
        return max(0, end - first)

    def gaps(self, topic: str, queue: int) -> list[tuple[int, int]]:
        self._queue(topic, queue)
        return []

    def read(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> list[StoredMessage]:
        chosen: list[StoredMessage] = []
        size = 0
        where = self._queue(topic, queue)
        first = max(offset, where.start)
        ttl_us = self._topics[topic].ttl_us
        for message in where.messages[first : first + limit]:
            size += len(message.payload)
            if chosen and size > max_bytes:
                break
            if ttl_us:
                message = msgspec.structs.replace(message)
                expires_us = message.committed_us + ttl_us
                message.expires_us = min(message.expires_us or expires_us, expires_us)
            chosen.append(message)
        return chosen

    def read_run(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> MessageRun | None:
        if min(limit, self.bounds(topic, queue)[1] - offset) < LEAST:
            return None
        return run_of(self.read(topic, queue, offset, limit, max_bytes), offset)

    def read_tagged(
        self, topic: str, queue: int, offset: int, limit: int, max_bytes: int, tags: frozenset[int]
    ) -> tuple[list[StoredMessage], int]:
        chosen: list[StoredMessage] = []
        size, end = 0, offset
        for message in self.read(topic, queue, offset, limit, 1 << 62):
            if message.tag_hash in tags:
                size += len(message.payload)
                if chosen and size > max_bytes:
                    return chosen, chosen[-1].offset + 1
                chosen.append(message)
            end = message.offset + 1
        return chosen, end

    def read_hashes(
        self, topic: str, queue: int, offset: int, limit: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        read = self.read(topic, queue, offset, limit, 1 << 62)
        return (
            np.array([m.offset for m in read], np.uint64),
            np.array([m.key_hash for m in read], np.uint64),
            np.array([m.tag_hash for m in read], np.uint32),
        )

    def read_ids(self, topic: str, queue: int, offset: int, limit: int) -> list[tuple[int, bytes]]:
        return [(m.committed_us, m.transaction_id) for m in self.read(topic, queue, offset, limit, 1 << 62)]

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> Iterator[StoredMessage]:
        wanted = key_hash(key)
        names = [topic] if topic is not None else list(self._topics)
        matches = [
            m
            for name, number in self._queues
            if name in names
            for m in self.read(name, number, 0, 1 << 62, 1 << 62)
            if m.key_hash == wanted and from_us <= m.committed_us < until_us
        ]
        return iter(sorted(matches, key=lambda m: (m.committed_us, m.offset))[:limit])

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        where = self._queue(topic, queue)
        retained = where.messages[where.start :]
        return next((m.offset for m in retained if m.committed_us >= time_us), len(where.messages))

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        return list(self._placed.get(transaction_id, ()))

    def trim(self, topic: str, queue: int, offset: int) -> None:
        where = self._queue(topic, queue)
        where.start = max(where.start, min(offset, len(where.messages)))
