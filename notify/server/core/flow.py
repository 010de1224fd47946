"""Flow control for producers: the bound on a topic's backlog, and the rates of topics and producer groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from notify.errors import Backpressure, NotifyError
from notify.runtime.clock import Clock
from notify.server.access.principal import Principal
from notify.server.delivery import Delivery
from notify.server.metrics import Metrics
from notify.server.rate import TokenBucket
from notify.storage.queues import queues_of
from notify.storage.topics import Backlog, Topic
from notify.storage.transactions import TransactionStore

HOLD_SECONDS = 2.0
"""How long a producer waits for room if the policy is `hold`: less than the SDK waits for the answer to its half."""
LOOK_SECONDS = 0.02
LOOK_US = 5_000
RETRY_BACKLOG_SECONDS = 1.0


@dataclass(slots=True)
class RateLimits:
    """Rates by name: messages a second for topics and consumer groups, transactions a second for producer groups."""

    topics: dict[str, float] = field(default_factory=dict)
    producer_groups: dict[str, float] = field(default_factory=dict)
    consumer_groups: dict[str, float] = field(default_factory=dict)

    def concerning(self, principal: Principal) -> RateLimits:
        """The rates of the topics and groups that a principal may use; all rates if it may `view`."""
        if principal.may("view"):
            return self
        return RateLimits(
            {name: rate for name, rate in self.topics.items() if principal.may("publish", name)},
            {name: rate for name, rate in self.producer_groups.items() if principal.may("check", name)},
            {name: rate for name, rate in self.consumer_groups.items() if principal.may_some("consume", name)},
        )


class Gate:
    """Tells whether a topic with a bounded backlog or a rate takes another message."""

    __slots__ = ("_admitted", "_lag", "_looked_us", "bucket", "topic")

    def __init__(self, topic: Topic, bucket: TokenBucket | None) -> None:
        self.topic = topic
        self.bucket = bucket
        self._looked_us = 0
        self._lag = 0
        self._admitted = 0

    def room(self, lag: Callable[[str], int], now_us: int) -> bool:
        """Whether the slowest group's lag is below the topic's bound."""
        if now_us - self._looked_us > LOOK_US or now_us < self._looked_us:
            self._lag, self._admitted, self._looked_us = lag(self.topic.name), 0, now_us
        return self._lag + self._admitted < self.topic.backlog

    def admit(self) -> None:
        self._admitted += 1


class Flow:
    """Admits messages to topics. Holds a gate for each topic that has a bound or a rate."""

    def __init__(self, store: TransactionStore, delivery: Delivery | None, clock: Clock, metrics: Metrics) -> None:
        self._store = store
        self._queues = queues_of(store)
        self._delivery = delivery
        self._lag: Callable[[str], int] = (lambda topic: 0) if delivery is None else delivery.followers.lag
        """The lag of the slowest group of a topic, in messages; 0 on a server without queues."""
        self._clock = clock
        self._metrics = metrics
        self.limits = RateLimits()
        self.gates: dict[str, Gate] = {}
        self._groups: dict[str, TokenBucket] = {}
        self.waits = 0
        """How often a message has waited for room."""
        for topic in store.topics():
            self.changed(topic)

    def changed(self, topic: Topic) -> None:
        """Make, replace or drop the gate of a topic that was made or changed."""
        rate = self.limits.topics.get(topic.name)
        if topic.backlog or rate is not None:
            bucket = TokenBucket(rate, self._clock()) if rate is not None else None
            self.gates[topic.name] = Gate(topic, bucket)
        else:
            self.gates.pop(topic.name, None)

    def deleted(self, topic: str) -> None:
        """Drop the gate of a topic that was deleted. A topic of this name that is made later gets another one."""
        self.gates.pop(topic, None)

    def set_limits(self, limits: RateLimits) -> None:
        """Apply other rates from now on."""
        changed = {*self.limits.topics, *limits.topics}
        self.limits = limits
        for name in changed:
            topic = self._store.topic(name)
            if topic is not None:
                self.changed(topic)
        now_us = self._clock()
        self._groups = {name: TokenBucket(rate, now_us) for name, rate in limits.producer_groups.items()}
        if self._delivery is not None:
            self._delivery.set_rates(limits.consumer_groups)

    def has_rate(self, group: str) -> bool:
        """Whether a producer group has a rate; then call `check_group` for each of its transactions."""
        return group in self._groups

    def check_group(self, group: str) -> None:
        """Count one more transaction of a producer group. Raises Backpressure if its rate is used up."""
        bucket = self._groups.get(group)
        if bucket is not None:
            self._take(bucket, f"producer group {group!r} may send {bucket.per_second:g} transactions/s")

    async def check(self, gate: Gate, wait_until_us: int) -> None:
        """Count one more message to a topic. With the policy `hold` it waits for room until `wait_until_us`.

        Raises Backpressure if the topic's rate is used up, or its backlog is full.
        """
        if gate.bucket is not None:
            self._take(gate.bucket, f"topic {gate.topic.name!r} takes {gate.bucket.per_second:g} messages/s")
        topic = gate.topic
        if not topic.backlog:
            return
        while not gate.room(self._lag, self._clock()):
            if topic.backlog_policy is Backlog.DROP_OLDEST:
                break  # `drop_oldest` makes room afterwards
            if topic.backlog_policy is Backlog.REFUSE or self._clock() >= wait_until_us:
                self._metrics.refused_backlog += 1
                raise Backpressure(
                    f"the backlog of topic {topic.name!r} is full: a group has {topic.backlog} messages before it; "
                    "send again when its consumers have caught up",
                    "backlog_full",
                    RETRY_BACKLOG_SECONDS,
                )
            self.waits += 1
            await asyncio.sleep(LOOK_SECONDS)
        gate.admit()

    def _take(self, bucket: TokenBucket, what: str) -> None:
        try:
            bucket.admit(self._clock(), what)
        except Backpressure:
            self._metrics.refused_rate += 1
            raise

    def drop_oldest(self) -> None:
        """Trim each topic with that policy to its backlog; groups skip what was dropped."""
        queues = self._queues
        if queues is None or self._delivery is None:
            return
        for gate in self.gates.values():
            topic = gate.topic
            if not topic.backlog or topic.backlog_policy is not Backlog.DROP_OLDEST:
                continue
            queue_backlog = -(-topic.backlog // topic.queues)
            has_dropped = False
            for queue in range(topic.queues):
                start, end = queues.bounds(topic.name, queue)
                floor = self._delivery.followers.floor(topic.name, queue)
                if floor is None or queues.count(topic.name, queue, max(start, floor), end) <= queue_backlog:
                    continue
                if queues.count(topic.name, queue, end - queue_backlog, end) == queue_backlog:  # no gap there
                    queues.trim(topic.name, queue, end - queue_backlog)
                    has_dropped = True
            if has_dropped:
                self._delivery.dropped(topic.name)


def retry_after(error: NotifyError) -> float | None:
    """Seconds after which the same request may succeed; None if it never will."""
    if isinstance(error, Backpressure):
        return error.retry_after
    return 1.0 if error.retryable else None
