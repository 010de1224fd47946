"""Topics and their queues in the log's memory: only numbers, because messages stay in the log."""

from __future__ import annotations

import msgspec

from notify.storage.log.entry import key_hash_of_tail
from notify.storage.log.meta import NO_MORE_POLICIES, Growths, MorePolicies, TopicSet
from notify.storage.topics import Backlog, Flush, Topic, with_growth


class Policy(msgspec.Struct, frozen=True):
    """The bounds of a topic. Topics with the same policy share one object, because there may be 100,000 of them."""

    retention_us: int = 0
    flush: Flush = Flush.SYNC
    retention_bytes: int = 0
    ttl_us: int = 0
    backlog: int = 0
    backlog_policy: Backlog = Backlog.REFUSE

    @classmethod
    def of(cls, topic: Topic) -> Policy:
        policy = cls(
            topic.retention_us,
            topic.flush,
            topic.retention_bytes,
            topic.ttl_us,
            topic.backlog,
            topic.backlog_policy,
        )
        return DEFAULT_POLICY if policy == DEFAULT_POLICY else policy

    def more(self, grown: Growths) -> MorePolicies:
        """The policies that a topic's records have in `more`: all but retention and flush."""
        if self is DEFAULT_POLICY and not grown:
            return NO_MORE_POLICIES
        return MorePolicies(self.retention_bytes, self.ttl_us, self.backlog, self.backlog_policy, grown)


DEFAULT_POLICY = Policy()


class Queue(msgspec.Struct, gc=False, eq=False):
    """One partition of a topic. The next commit gets `next_offset`; everything below `visible` is durable.

    Queues and topics live as long as the log. Without garbage collection each takes 16 bytes less.
    """

    topic: LogTopic
    number: int
    key: int
    next_offset: int = 0
    visible: int = 0
    start: int = 0


class LogTopic(msgspec.Struct, gc=False, eq=False):
    """A topic by its number in the log."""

    name: str
    policy: Policy = DEFAULT_POLICY
    deleted: bool = False
    turn: int = 0
    queues: tuple[Queue, ...] = ()
    grown: Growths = ()
    """For each growth of the number of queues: the next offset of each queue before it."""

    @classmethod
    def numbered(cls, number: int, name: str, queues: int) -> LogTopic:
        """A new topic."""
        topic = cls(name)
        topic.queues = tuple([Queue(topic, n, queue_key(number, n)) for n in range(queues)])
        return topic

    @property
    def id(self) -> int:
        """Its number, with which its queues' keys begin."""
        return self.queues[0].key >> 16

    def grown_to(self, queues: int) -> Growths:
        """`grown` once the topic has `queues` queues. Raises InvalidRequest if it grew too often."""
        if queues <= len(self.queues):
            return self.grown
        ends = tuple([queue.next_offset for queue in self.queues])
        return with_growth(self.name, self.grown, ends, [queue.start for queue in self.queues])

    def record(self) -> TopicSet:
        """The META record of the topic."""
        policy = self.policy
        more = policy.more(self.grown)
        return TopicSet(self.id, self.name, len(self.queues), policy.retention_us, policy.flush, more)

    def restore(self, retention_us: int, flush: Flush, more: MorePolicies) -> None:
        """Apply the policies and the growth of a record."""
        policy = Policy(retention_us, flush, more.retention_bytes, more.ttl_us, more.backlog, more.backlog_policy)
        self.policy = DEFAULT_POLICY if policy == DEFAULT_POLICY else policy
        self.grown = more.grown

    def grow(self, queues: int) -> None:
        """Grow to at least so many queues."""
        more = [Queue(self, n, queue_key(self.id, n)) for n in range(len(self.queues), queues)]
        if more:
            self.queues = (*self.queues, *more)

    def described(self) -> Topic:
        """The topic as the storage's callers see it."""
        p = self.policy
        return Topic(
            self.name,
            len(self.queues),
            p.retention_us,
            p.flush,
            p.retention_bytes,
            p.ttl_us,
            p.backlog,
            p.backlog_policy,
            self.grown,
            self.id,
        )

    def queue_for(self, hashed_key: int) -> Queue:
        """The queue of a key's hash; for 0, a message without a key, the next queue in turn."""
        count = len(self.queues)
        if hashed_key or count == 1:
            return self.queues[hashed_key % count]
        self.turn = (self.turn + 1) % count
        return self.queues[self.turn]

    def queue_now(self, chosen: int, tail: bytes) -> Queue:
        """The queue of a message that is committed or released now; `tail`: the end of its entry.

        `chosen` is the queue from when it was stored. If the topic has grown since, the key's present queue counts.
        """
        if self.grown and (hashed_key := key_hash_of_tail(tail)):
            return self.queue_for(hashed_key)
        return self.queues[chosen]


class TopicsById:
    """Topics by their numbers, which are consecutive: a dictionary would take seven times the memory of this list."""

    def __init__(self) -> None:
        self.rows: list[LogTopic | None] = [None]
        """For loops over many messages, in which a method call for each would cost as much as the work itself."""

    @property
    def last(self) -> int:
        """The highest number."""
        return len(self.rows) - 1

    def get(self, number: int) -> LogTopic | None:
        return self.rows[number] if number < len(self.rows) else None

    def __getitem__(self, number: int) -> LogTopic:
        """Raises LookupError."""
        topic = self.rows[number]
        if topic is None:
            raise KeyError(number)
        return topic

    def __setitem__(self, number: int, topic: LogTopic) -> None:
        self.rows += [None] * (number + 1 - len(self.rows))
        self.rows[number] = topic

    def values(self) -> list[LogTopic]:
        return [topic for topic in self.rows if topic is not None]


def queue_key(topic_id: int, number: int) -> int:
    return (topic_id << 16) | number
