"""Kafka in an exploration: what it has of a run's messages, and what the service's groups have not settled."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.client.consumer.consumer import AsyncConsumer, Consumer
from notify.errors import InvalidRequest, Timeout
from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS, dead_letter_topic, kafka_group, retry_topic
from notify.kafka.records import ID, header, listed
from notify.kafka.table import PASSING

CALL_SECONDS = 60.0
POLL_SECONDS = 0.5
SILENT_SECONDS = 30.0
"""How long Kafka may give no record while partitions are read."""
LEAVE_SECONDS = 30.0
"""How long the group of a killed process may keep its members: Kafka waits for their sessions to end."""
LEAVE_LOOK_SECONDS = 0.5
"""The pause between two tries to move such a group."""
LEADER_SECONDS = 10.0
"""How long one question to a partition may take; the next one looks for the leader once more."""
LEADER_LOOK_SECONDS = 0.1
"""The pause between two of these questions."""
Place = tuple[str, int]
"""A topic and a partition."""


@dataclass(frozen=True, slots=True)
class ExploredGroup:
    """A consumer group of the service. `kafka_group`: the group in Kafka that has its positions. `topics`: what it
    reads, names and patterns, with its topic of retries."""

    name: str
    kafka_group: str
    topics: frozenset[str]

    def reads(self, topic: str) -> bool:
        is_own = topic.startswith((*OWN_TOPICS, "__"))
        return topic in self.topics or (not is_own and any(fnmatchcase(topic, pattern) for pattern in self.topics))


def group_of(consumer: AsyncConsumer | Consumer) -> ExploredGroup:
    """The group of a consumer over Kafka. Raises InvalidRequest for one whose positions no later process continues."""
    is_broadcast = any(handler.mode == "broadcast" for handler in consumer._handlers.values())
    if is_broadcast and not consumer._is_named:
        raise InvalidRequest(
            f"group {consumer.group} has a broadcast topic: give the consumer an instance=, which a restarted process "
            "has again"
        )
    retries = [] if is_broadcast else [retry_topic(consumer.group)]
    in_kafka = kafka_group(consumer.group, consumer.instance if is_broadcast else None)
    return ExploredGroup(consumer.group, in_kafka, frozenset([*consumer._handlers, *retries]))


class ExploredKafka:
    """The topics and groups of the service under test, which stay from run to run. Each run begins after the records
    of the one before."""

    def __init__(self, url: str) -> None:
        self._cluster = Cluster.of(url)
        self._reader = self._cluster.consumer({"group.id": "notify-explorer", "enable.partition.eof": True})
        self._members: dict[str, Any] = {}
        """Clients that ask for the groups' progress, and are not members themselves."""
        self._begins: dict[Place, int] = {}
        """The offsets at which this run's records begin."""
        self._letters_before = 0
        self._has_begun = False

    def begin(self, groups: Collection[ExploredGroup], topics: Iterable[str]) -> None:
        """A run begins: no group gets what the run before has left. Raises Timeout if a group keeps its members, and
        InvalidRequest if messages wait for a group before the first run: they are not the explorer's to skip."""
        self._begins = {place: self._ends(place)[1] for place in self._places(topics)}
        self._letters_before = self._letters(groups)
        for group in groups:
            positions = self._positions(group)
            left = [committed for committed in positions if self._lag(committed)]
            has_worked = any(committed.offset >= 0 for committed in positions)
            if left and has_worked and not self._has_begun:
                raise InvalidRequest(
                    f"messages wait in Kafka for group {group.name}, which each run would skip: explore with a group "
                    "of its own, or, if they are not needed, move this one past them (kafka-consumer-groups "
                    "--reset-offsets --to-latest)"
                )
            if left:
                self._skip(group, left)
        self._has_begun = True

    def unsettled(self, groups: Iterable[ExploredGroup]) -> int:
        """How many records the groups have not settled, with those that wait for another attempt."""
        return sum(self._lag(committed) for group in groups for committed in self._positions(group))

    def dead_letters(self, groups: Iterable[ExploredGroup]) -> int:
        """How many dead letters this run has made."""
        return self._letters(groups) - self._letters_before

    def messages(self, topics: Iterable[str]) -> Counter[str]:
        """The ids of this run's messages. Raises Timeout if Kafka gives nothing for SILENT_SECONDS."""
        places = self._places(topics)
        found: Counter[str] = Counter()
        self._reader.assign([TopicPartition(*place, self._begins.get(place, 0)) for place in places])
        left = set(places)
        until = time.monotonic() + SILENT_SECONDS
        while left:
            record = self._reader.poll(POLL_SECONDS)
            if record is None:
                if time.monotonic() > until:
                    some = ", ".join(f"{topic}[{number}]" for topic, number in sorted(left)[:5])
                    raise Timeout(
                        f"Kafka gave nothing for {SILENT_SECONDS:g} s, and {len(left)} partitions are not read to "
                        f"their end ({some}): look whether its brokers run"
                    )
                continue
            until = time.monotonic() + SILENT_SECONDS
            error = record.error()
            if error is None:
                found[header(listed(record), ID) or ""] += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard((record.topic(), record.partition()))
            else:
                raise KafkaException(error)
        self._reader.unassign()
        return found

    def close(self) -> None:
        for client in (self._reader, *self._members.values()):
            client.close()

    def _positions(self, group: ExploredGroup) -> list[TopicPartition]:
        """Where a group is in each partition that it reads; an offset below 0: nothing is committed."""
        partitions = [TopicPartition(*place) for place in self._places(filter(group.reads, self._topics()))]
        committed: list[TopicPartition] = []
        if partitions:
            committed = self._member(group).committed(partitions, timeout=CALL_SECONDS)
        return committed

    def _lag(self, committed: TopicPartition) -> int:
        first, end = self._ends((committed.topic, committed.partition))
        return max(0, end - max(first, committed.offset))

    def _skip(self, group: ExploredGroup, partitions: list[TopicPartition]) -> None:
        """Move a group past the last records of partitions. Kafka refuses that while the group has members."""
        moved = [TopicPartition(p.topic, p.partition, self._ends((p.topic, p.partition))[1]) for p in partitions]
        until = time.monotonic() + LEAVE_SECONDS
        while True:
            try:
                refused = self._member(group).commit(offsets=moved, asynchronous=False)
                error = next((partition.error for partition in refused if partition.error is not None), None)
            except KafkaException as raised:
                error = raised.args[0]
            if error is None:
                return
            if time.monotonic() > until:
                raise Timeout(
                    f"group {group.name} still has members {LEAVE_SECONDS:g} s after its process was killed, so that "
                    f"the next run would get what this one has left: {error.str()}"
                )
            time.sleep(LEAVE_LOOK_SECONDS)

    def _member(self, group: ExploredGroup) -> Any:
        member = self._members.get(group.kafka_group)
        if member is None:
            member = self._members[group.kafka_group] = self._cluster.consumer({"group.id": group.kafka_group})
        return member

    def _letters(self, groups: Iterable[ExploredGroup]) -> int:
        topics = {dead_letter_topic(group.name) for group in groups}
        return sum(self._ends(place)[1] for place in self._places(topics))

    def _topics(self) -> Any:
        """The topics that there are, by name."""
        return self._reader.list_topics(timeout=CALL_SECONDS).topics

    def _places(self, topics: Iterable[str]) -> list[Place]:
        """The partitions of those topics that there are."""
        known = self._topics()
        return [(topic, number) for topic in topics if topic in known for number in known[topic].partitions]

    def _ends(self, place: Place) -> tuple[int, int]:
        """The offset of the first record, and the one after the last record. A partition that was just made may not be
        known to all, or have no leader yet, and is asked again."""
        until = time.monotonic() + CALL_SECONDS
        while True:
            try:
                first, end = self._reader.get_watermark_offsets(TopicPartition(*place), timeout=LEADER_SECONDS)
            except KafkaException as raised:
                error = raised.args[0]
                if not (error.retriable() or error.code() in PASSING) or time.monotonic() > until:
                    raise
                time.sleep(LEADER_LOOK_SECONDS)
                self._topics()  # else the client believes what it read when the topic was made
            else:
                return first, end
