"""Consumer groups over Kafka as the brokers know them at one moment: positions, ends, members."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from notify.kafka.groups import DEAD_LETTER, OWN_TOPICS, consumer_group
from notify.kafka.progress import Progress
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.offsets import CALL_SECONDS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """A group's position in one partition, whose records are those from `start` to before `end`."""

    topic: str
    partition: int
    start: int
    end: int
    progress: Progress

    @property
    def lag(self) -> int:
        """The records from the position on that are not done.

        Records of transactions themselves count among them, until a consumer has read the partition to its end.
        """
        return max(0, self.end - max(self.progress.offset, self.start) - len(self.progress.done))


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a group; `partitions` are those that it reads."""

    name: str
    host: str
    partitions: int


@dataclass(frozen=True, slots=True)
class KafkaGroup:
    """`name`: of a broadcast's instance `{group}@{instance}`."""

    name: str
    positions: tuple[Position, ...]
    members: tuple[Member, ...]

    @property
    def base(self) -> str:
        """The name of the group that subscribed, which dead letters and wishes go by."""
        return consumer_group(self.name)

    @property
    def lag(self) -> int:
        return sum(position.lag for position in self.positions)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All groups of Notify's consumers, by name, and all topics with their number of partitions."""

    groups: Mapping[str, KafkaGroup]
    topics: Mapping[str, int]

    def message_topics(self) -> list[str]:
        return sorted(name for name in self.topics if not name.startswith((*OWN_TOPICS, "__")))


def take(admin: AdminClient) -> Snapshot:
    """Ask the brokers. A group is one of Notify's if it has a dead-letter topic. Raises KafkaException."""
    topics = {name: len(topic.partitions) for name, topic in admin.list_topics(timeout=CALL_SECONDS).topics.items()}
    ours = {name.removeprefix(DEAD_LETTER) for name in topics if name.startswith(DEAD_LETTER)}
    listed = _result(admin.list_consumer_groups(request_timeout=CALL_SECONDS))
    names = sorted(g.group_id for g in listed.valid if consumer_group(g.group_id) in ours)
    committed = {
        name: _result(
            admin.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(name)], require_stable=True, request_timeout=CALL_SECONDS
            )[name]
        )
        for name in names
    }
    progress = {
        name: {
            (p.topic, p.partition): Progress.of(p.offset, p.metadata)
            for p in answer.topic_partitions or ()
            if p.offset >= 0 and p.topic in topics
        }
        for name, answer in committed.items()
    }
    places = {place for by_place in progress.values() for place in by_place}
    starts, ends = offsets.earliest(admin, places), offsets.latest(admin, places)
    members = _members(admin, names)
    groups = {
        name: KafkaGroup(
            name,
            tuple(
                Position(*place, starts[place], ends[place], at)
                for place, at in sorted(progress[name].items())
                if place in starts and place in ends
            ),
            members.get(name, ()),
        )
        for name in names
    }
    return Snapshot(groups, topics)


def _members(admin: AdminClient, names: list[str]) -> dict[str, tuple[Member, ...]]:
    if not names:
        return {}
    members = {}
    for name, answer in admin.describe_consumer_groups(names, request_timeout=CALL_SECONDS).items():
        described = _result(answer)
        members[name] = tuple(
            Member(m.client_id, m.host, len(m.assignment.topic_partitions) if m.assignment else 0)
            for m in described.members
        )
    return members


def _result(answer: Future[T]) -> T:
    return answer.result(CALL_SECONDS)
