"""A snapshot of consumer groups over Kafka from the brokers: positions, ends, members, dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from notify.kafka.groups import DEAD_LETTER, OWN_TOPICS, OWNER, consumer_group, dead_letter_topic, owner_topic
from notify.kafka.progress import Progress
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, PASSING, gathered
from notify.server.groups.kafka.offsets import Place

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """A group's position in one partition, which has records from `start` to before `end`. `hidden`: how many offsets
    follow that readers of committed records do not get yet, because a transaction is open."""

    topic: str
    partition: int
    start: int
    end: int
    progress: Progress
    hidden: int = 0

    @property
    def next(self) -> int:
        """The offset that the next record will have."""
        return self.end + self.hidden

    @property
    def is_blocked(self) -> bool:
        """Whether the group is done with all that it gets before an open transaction ends."""
        return self.hidden > 0 and self.lag <= self.hidden

    @property
    def lag(self) -> int:
        """The number of records from the position on that are not done, also of those that an open transaction hides.

        Transactions' markers count too, until a consumer has read the partition to its end.
        """
        return max(0, self.next - max(self.progress.offset, self.start) - len(self.progress.done))


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a group, with its assigned partitions."""

    name: str
    host: str
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class KafkaGroup:
    """A group at the moment of the snapshot; the instance of a broadcast is named `{group}@{instance}`."""

    name: str
    positions: tuple[Position, ...]
    members: tuple[Member, ...]

    @property
    def base(self) -> str:
        """The name of the group that subscribed, which dead letters and wishes use."""
        return consumer_group(self.name)

    @property
    def lag(self) -> int:
        return sum(position.lag for position in self.positions)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All groups of Notify's consumers, by name, and all topics with their number of partitions."""

    groups: Mapping[str, KafkaGroup]
    topics: Mapping[str, int]
    letters: Mapping[Place, tuple[int, int]] = field(default_factory=dict)
    """(first offset, offset after the last one) of each partition of the groups' dead-letter topics."""
    unknown: frozenset[str] = frozenset()
    """Topics and groups without complete answers: a partition, or the group, has no leader now."""

    def message_topics(self) -> list[str]:
        return sorted(name for name in self.topics if not name.startswith((*OWN_TOPICS, "__")))

    def is_whole(self, group: KafkaGroup) -> bool:
        """Whether all positions of a group are known: otherwise its lag is larger than shown."""
        return self.unknown.isdisjoint((group.name, *(position.topic for position in group.positions)))

    def letters_of(self, group: str) -> dict[int, tuple[int, int]]:
        """The bounds of a group's dead letters by partition."""
        topic = dead_letter_topic(group)
        places = ((topic, partition) for partition in range(self.topics.get(topic, 0)))
        return {place[1]: self.letters[place] for place in places if place in self.letters}


def take(admin: AdminClient, *, in_part: bool = False) -> Snapshot:
    """Take a snapshot. Groups with a dead-letter topic are Notify's. Raises KafkaException, TimeoutError.

    `in_part`: leave out partitions and groups without a leader, instead of raising. Kafka's client may abort the
    process in this call: a server makes the call in another process (notify/kafka/admin_process.py).
    """
    unknown: set[str] | None = set() if in_part else None
    topics = {name: len(topic.partitions) for name, topic in admin.list_topics(timeout=CALL_SECONDS).topics.items()}
    ours = {name.removeprefix(DEAD_LETTER) for name in topics if name.startswith(DEAD_LETTER)}
    listed = gathered({"": admin.list_consumer_groups(request_timeout=CALL_SECONDS)})[""]
    if isinstance(listed, KafkaError):
        raise KafkaException(listed)
    present = {g.group_id for g in listed.valid}
    if listed.errors:  # of brokers that did not answer: their groups are not in the list
        if unknown is None:
            raise KafkaException(listed.errors[0])
        unknown |= ours - present
        present |= ours
    names = sorted(name for name in present if consumer_group(name) in ours)
    progress = _progress(admin, names, topics, unknown)
    letters = {(dead_letter_topic(name), p) for name in ours for p in range(topics[dead_letter_topic(name)])}
    places = {place for by_place in progress.values() for place in by_place} | letters
    starts, ends = offsets.earliest(admin, places, unknown), offsets.latest(admin, places, unknown)
    lasts = offsets.ends(admin, places - letters, unknown)
    # An owner, which reads by assignment, is a member of the group that assigns the owner's partition.
    owners = {name: owner_topic(name) for name in names if owner_topic(name) in present}
    members = _members(admin, [*names, *owners.values()], unknown)
    groups = {
        name: KafkaGroup(
            name,
            tuple(
                _position(place, starts, ends, lasts, at)
                for place, at in sorted(progress.get(name, {}).items())
                if (place in starts and place in ends) or place[0] in (unknown or ())
            ),
            members.get(name, ()) + members.get(owners.get(name, ""), ()),
        )
        for name in names
    }
    bounds = {place: (starts[place], ends[place]) for place in letters if place in starts and place in ends}
    return Snapshot(groups, topics, bounds, frozenset(unknown or ()))


def _position(
    place: Place, starts: Mapping[Place, int], ends: Mapping[Place, int], lasts: Mapping[Place, int], at: Progress
) -> Position:
    start, end = starts.get(place, at.offset), ends.get(place, at.offset)
    return Position(*place, start, end, at, max(0, lasts.get(place, end) - end))


def _progress(
    admin: AdminClient, names: Iterable[str], topics: Mapping[str, int], unknown: set[str] | None
) -> dict[str, dict[Place, Progress]]:
    """The committed progress of each group, in partitions of topics that exist.

    A commit in an open transaction does not count yet. If stable positions were required, the brokers would return none
    for such a partition as long as the transaction of a killed consumer is open.
    """
    asked = {
        name: admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(name)], require_stable=False, request_timeout=CALL_SECONDS
        )[name]
        for name in names
    }
    return {
        name: {
            (p.topic, p.partition): Progress.of(p.offset, p.metadata)
            for p in answer.topic_partitions or ()
            if p.offset >= 0 and p.topic in topics and not p.topic.startswith(OWNER)
        }
        for name, answer in _told(gathered(asked), unknown).items()
    }


def _members(admin: AdminClient, names: list[str], unknown: set[str] | None) -> dict[str, tuple[Member, ...]]:
    if not names:
        return {}
    described = _told(gathered(admin.describe_consumer_groups(names, request_timeout=CALL_SECONDS)), unknown)
    return {name: tuple(_member(m) for m in group.members) for name, group in described.items()}


def _member(described: Any) -> Member:
    assigned = described.assignment.topic_partitions if described.assignment else ()
    return Member(described.client_id, described.host, tuple((p.topic, p.partition) for p in assigned))


def _told(answers: Mapping[str, T | KafkaError], unknown: set[str] | None) -> dict[str, T]:
    """The brokers' answers by group. A group without a leader is added to `unknown`; other errors raise
    KafkaException."""
    told: dict[str, T] = {}
    for name, answer in answers.items():
        if not isinstance(answer, KafkaError):
            told[name] = answer
        elif unknown is not None and answer.code() in PASSING:
            unknown.add(name)
        else:
            raise KafkaException(answer)
    return told
