"""Topics and their queues, as the log's memory holds them: numbers only, messages stay in the log."""

from __future__ import annotations

from storage.hashing import key_hash
from storage.store import Flush, Topic


class Queue:
    """One partition of a topic. `next_offset` is given to the next commit; below `visible` all is durable."""

    __slots__ = ("key", "next_offset", "number", "start", "topic", "visible")

    def __init__(self, topic: LogTopic, number: int) -> None:
        self.topic = topic
        self.number = number
        self.key = queue_key(topic.id, number)
        self.next_offset = 0
        self.visible = 0
        self.start = 0


class LogTopic:
    """A topic by its number in the log."""

    __slots__ = ("deleted", "flush", "id", "name", "queues", "retention_us", "turn")

    def __init__(self, topic_id: int, name: str, queues: int, retention_us: int, flush: Flush = Flush.SYNC) -> None:
        self.id = topic_id
        self.name = name
        self.retention_us = retention_us
        self.flush = flush
        self.deleted = False
        self.turn = 0
        self.queues = [Queue(self, n) for n in range(queues)]

    def described(self) -> Topic:
        """As everyone but the log sees it."""
        return Topic(self.name, len(self.queues), self.retention_us, self.flush)

    def queue_for(self, key: str | None) -> int:
        """The queue of a key, or the next in turn."""
        if len(self.queues) == 1:
            return 0
        if key is not None:
            return key_hash(key) % len(self.queues)
        self.turn = (self.turn + 1) % len(self.queues)
        return self.turn


def queue_key(topic_id: int, number: int) -> int:
    return (topic_id << 16) | number
