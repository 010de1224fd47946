"""Topics and their queues, as the log's memory holds them: numbers only, messages stay in the log."""

from __future__ import annotations

import msgspec

from notify.storage.log.entry import key_hash_of_tail
from notify.storage.log.meta import NO_MORE_POLICIES, Growths, MorePolicies, TopicSet
from notify.storage.topics import Backlog, Flush, Topic, with_growth


class Policy(msgspec.Struct, frozen=True):
    """Bounds on what a topic keeps and takes. Topics of the same policy share one: there may be 100,000 of them."""

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
        """The policies that a topic's records have besides retention and flush."""
        if self is DEFAULT_POLICY and not grown:
            return NO_MORE_POLICIES
        return MorePolicies(self.retention_bytes, self.ttl_us, self.backlog, self.backlog_policy, grown)


DEFAULT_POLICY = Policy()


class Queue(msgspec.Struct, gc=False, eq=False):
    """One partition of a topic. `next_offset` is given to the next commit; below `visible` all is durable.

    Queues and topics live as long as the log: left out of garbage collection they take 16 bytes less each.
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
    """Each time the number of queues grew: the next offset of each queue that there was."""

    @classmethod
    def numbered(cls, number: int, name: str, queues: int) -> LogTopic:
        """A new topic."""
        topic = cls(name)
        topic.queues = tuple([Queue(topic, n, queue_key(number, n)) for n in range(queues)])
        return topic

    @property
    def id(self) -> int:
        """Its number: what its queues' keys begin with."""
        return self.queues[0].key >> 16

    def grown_to(self, queues: int) -> Growths:
        """`grown` as it is once the topic has so many queues. Raises InvalidRequest where it grew too often."""
        if queues <= len(self.queues):
            return self.grown
        ends = tuple([queue.next_offset for queue in self.queues])
        return with_growth(self.name, self.grown, ends, [queue.start for queue in self.queues])

    def record(self) -> TopicSet:
        """The META record that says how the topic is."""
        policy = self.policy
        more = policy.more(self.grown)
        return TopicSet(self.id, self.name, len(self.queues), policy.retention_us, policy.flush, more)

    def restore(self, retention_us: int, flush: Flush, more: MorePolicies) -> None:
        """Take over what a record says of the topic's policies and growth."""
        policy = Policy(retention_us, flush, more.retention_bytes, more.ttl_us, more.backlog, more.backlog_policy)
        self.policy = DEFAULT_POLICY if policy == DEFAULT_POLICY else policy
        self.grown = more.grown

    def grow(self, queues: int) -> None:
        """Have at least so many queues."""
        more = [Queue(self, n, queue_key(self.id, n)) for n in range(len(self.queues), queues)]
        if more:
            self.queues = (*self.queues, *more)

    def described(self) -> Topic:
        """As everyone but the log sees it."""
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
        """The queue of a key, by its hash; of a message without a key (0) the next in turn."""
        count = len(self.queues)
        if hashed_key or count == 1:
            return self.queues[hashed_key % count]
        self.turn = (self.turn + 1) % count
        return self.queues[self.turn]

    def queue_now(self, chosen: int, tail: bytes) -> Queue:
        """The queue of a message that is committed or released now; `tail`: the end of its entry.

        `chosen`, when it was stored, may be from before the topic grew: a key's messages go where it belongs now.
        """
        if self.grown and (hashed_key := key_hash_of_tail(tail)):
            return self.queue_for(hashed_key)
        return self.queues[chosen]


class TopicsById:
    """Topics by their numbers, which are given in turn: a list where a dictionary would take seven times the room."""

    def __init__(self) -> None:
        self.rows: list[LogTopic | None] = [None]
        """For loops over many messages, in which a call of a method for each would cost as much as their work."""

    @property
    def last(self) -> int:
        """The highest number there is."""
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
