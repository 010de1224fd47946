"""OtherModes: finds consumers that share the group's partitions in the other way: by one owner, or among members;
another consumer with the name of this instance of a broadcast group; and programs other than Notify in the group.

Kafka does not keep them apart: an owner reads by assignment and commits in transactions, which Kafka accepts even if
the group has members. Both would handle every message, and overwrite each other's offsets. An instance of a broadcast
group is a group of its own: two consumers with its name would each get a part of the messages. If they start together,
neither finds the other as a member. So each also marks the group before it joins: the last mark stays, and a consumer
that finds another mark than its own gives way.

Any program may join the group, and Kafka gives it partitions, of which the handlers get nothing. Its commits lack the
metadata of Notify's. Only an assignor of Notify's own would keep it out, which Kafka's client cannot have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from notify.client.kafka.feed import PATIENCE_SECONDS, SESSION_SECONDS
from notify.client.kafka.partitions import Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import OTHERS_NOW, error_of, refusal
from notify.errors import Conflict, Unavailable
from notify.kafka import control
from notify.kafka.client_thread import ClientThread
from notify.kafka.cluster import Cluster
from notify.kafka.groups import owner_topic
from notify.kafka.progress import Progress
from notify.protocol import ids
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

LOOK_SECONDS = 0.5
CALL_SECONDS = 10.0
PASSING_SECONDS = 2.0 * SESSION_SECONDS
"""How long to wait for other consumers to go: a killed consumer counts as a member until its session ends."""
_NOBODY = (
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
)  # fmt: skip
"""Errors that mean that there never was an owner, or that this user may not see it."""


class OtherModes:
    """Looks, in a separate thread, for members of the group that consumers of the other way join.

    Make it on its event loop.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._thread = ClientThread("notify-kafka-modes")
        self._group = owner_topic(plan.group) if plan.sharing == "group" else plan.kafka_group
        # A topic that exists by now, and that this consumer may read.
        self._marked = control.TOPIC if plan.sharing == "broadcast" else owner_topic(plan.group)
        self._mark = ids.to_text(ids.new_id()) if plan.sharing == "broadcast" else ""
        self._others: set[Place] = set()
        """The partitions where another program had made the last commit, at the last look."""
        self._told: set[Place] = set()
        """Those of them that were logged."""

    async def refuse(self) -> None:
        """Raises Conflict (`mode_in_use`, `topic_is_taken`) if there are such consumers and they stay; Unavailable,
        Unauthorized. An instance of a broadcast group asks before it joins: later it would find itself, and asks
        `check_mark`."""
        began = time.monotonic()
        while True:
            try:
                if not await self._thread.call(self._are_there):
                    return
                if time.monotonic() - began > PASSING_SECONDS:
                    if self._plan.sharing == "broadcast":
                        raise self._is_taken()
                    raise Conflict(
                        f"group {self._plan.group!r} has consumers of another mode; stop them first", "mode_in_use"
                    )
            except Unavailable:  # for example, the group has no coordinator yet
                if time.monotonic() - began > PATIENCE_SECONDS:
                    raise
            await asyncio.sleep(LOOK_SECONDS)

    def _are_there(self) -> bool:
        """Whether the group has members: Kafka accepts a commit without a member id only if it has none. The committed
        offset has no meaning.

        Listing the group's members would work too, but if the connection drops meanwhile, Kafka's client crashes the
        process (librdkafka 2.16, issue 4605).
        """
        # The session bounds how long a commit waits for the group's coordinator.
        consumer = self._cluster.consumer({"group.id": self._group, "session.timeout.ms": SESSION_SECONDS * 1000})
        try:
            mark = TopicPartition(self._marked, 0, 0, self._mark)
            error = consumer.commit(offsets=[mark], asynchronous=False)[0].error
        except KafkaException as raised:
            error = error_of(raised)
        finally:
            consumer.close()
        if error is None or error.code() in _NOBODY:
            return False
        if error.code() in OTHERS_NOW:
            return True
        raise refusal(error, self._cluster, self._group)

    def check_mark(self, consumer: Consumer) -> None:
        """Raises Conflict if a consumer with the name of this instance has marked the group after this one, and
        KafkaException. `consumer`: a client of the group."""
        marked = consumer.committed([TopicPartition(self._marked, 0)], timeout=CALL_SECONDS)[0].metadata
        if marked and marked != self._mark:
            raise self._is_taken()

    async def tell_others(self, topics: Mapping[str, int]) -> None:
        """Log in which partitions of these topics (with their numbers of partitions) another program consumes with the
        group's name: where it has made the last commit, at two looks. A single one may be from before the group's
        consumers started, who commit soon. Raises Unavailable."""
        places = [(topic, n) for topic, count in topics.items() for n in range(count)]
        others = await self._thread.call(self._committed_by_others, places)
        again = others & self._others
        for topic in sorted({topic for topic, _ in again - self._told}):
            numbers = sorted(n for name, n in again if name == topic)
            log.error(
                "another program commits offsets of group %s, in %d partitions of topic %s, such as %d: it has joined "
                "the group, and what it gets there does not reach this group's handlers. Give it another group.id",
                self._plan.group, len(numbers), topic, numbers[0],
            )  # fmt: skip
        self._others, self._told = others, again

    def _committed_by_others(self, places: list[Place]) -> set[Place]:
        # Committed offsets would wait for the open transactions of the group's other consumers.
        consumer = self._cluster.consumer(
            {"group.id": self._plan.kafka_group, "isolation.level": "read_uncommitted"}
        )  # fmt: skip
        try:
            committed = consumer.committed([TopicPartition(*place) for place in places], timeout=CALL_SECONDS)
        except KafkaException as raised:
            raise refusal(error_of(raised), self._cluster, self._plan.kafka_group) from raised
        finally:
            consumer.close()
        return {
            (p.topic, p.partition)
            for p in committed
            if p.error is None and p.offset >= 0 and not Progress.of(p.offset, p.metadata).is_own
        }

    def _is_taken(self) -> Conflict:
        return Conflict(
            f"another consumer is instance {self._plan.instance!r} of group {self._plan.group!r}, and each would get a "
            "part of the messages: give each running consumer an instance= of its own",
            "topic_is_taken",
        )

    def close(self) -> None:
        """Stop looking, without waiting for a current look."""
        self._thread.close()
