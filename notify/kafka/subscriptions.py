"""Subscriptions of consumer groups over Kafka: the records of the topic `notify-subscriptions`.

Kafka stores a group's offsets, but not its mode, tags and filter, and not where it began. The owner of a partition
writes these here, for audits and for servers that show groups. The topic is compacted and has one partition. A record's
key is `{group}/{topic}/{partition}`, its value JSON, see Subscribed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.compacted import newest, write
from notify.kafka.rights import of_consumer
from notify.wire import UNDECODABLE

TOPIC = "notify-subscriptions"


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Subscribed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group's subscription to a partition. `start`: the first offset that it reads with this subscription.

    `at`: a later offset of the group, at most some hours old; 0: none was recorded since the start.
    `inbox_from_us`: when its consumers first reported an inbox, in microseconds since 1970; -1: they have none.
    `topic_id`: Kafka's id of the topic; empty if unknown.
    """

    mode: str
    start: int
    tags: tuple[str, ...] = ()
    filter: str = ""
    at: int = 0
    inbox_from_us: int = -1
    topic_id: str = ""

    def takes_as(self, other: Subscribed) -> bool:
        """Whether both subscriptions are equal except for where they began."""
        is_same_topic = self.topic_id == other.topic_id or not (self.topic_id and other.topic_id)
        return is_same_topic and (self.mode, self.tags, self.filter) == (other.mode, other.tags, other.filter)

    def with_inbox_of(self, other: Subscribed) -> Subscribed:
        """This subscription with the inbox of another record; if both have an inbox, with the earlier time."""
        from_us = other.inbox_from_us
        if min(from_us, self.inbox_from_us) >= 0:
            from_us = min(from_us, self.inbox_from_us)
        return msgspec.structs.replace(self, inbox_from_us=from_us)


class Subscriptions:
    """The recorded subscriptions of one group. Its methods block."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._noted: dict[Place, Subscribed] | None = None

    def note(self, wanted: Mapping[Place, Subscribed], *, begins: bool, renews: bool = False) -> None:
        """Record subscriptions; they are durable when it returns.

        `begins`: the group begins at these offsets, for the first time or after a reset. Otherwise it continues there,
        and only changes since the last record are written; with `renews` also the group's present offset. Raises
        Unavailable; InvalidRequest if the topic cannot be made.
        """
        if self._noted is None or renews:  # somebody may have deleted the topic
            make_topics(self._cluster, [TOPIC], compacted=True)
            self._noted = {place: s for (group, place), s in read(self._cluster).items() if group == self._group}
        changed: dict[Place, Subscribed] = {}
        for place, subscribed in wanted.items():
            noted = self._noted.get(place)
            if noted is None:
                changed[place] = subscribed
            elif begins or not noted.takes_as(subscribed):
                since = noted.with_inbox_of(subscribed).inbox_from_us
                changed[place] = msgspec.structs.replace(subscribed, inbox_from_us=since)
            else:
                updated = noted.with_inbox_of(subscribed)
                updated = msgspec.structs.replace(updated, topic_id=subscribed.topic_id or noted.topic_id)
                if renews and max(noted.start, noted.at) < subscribed.start:
                    updated = msgspec.structs.replace(updated, at=subscribed.start)
                if updated != noted:
                    changed[place] = updated
        if not changed:
            return
        values = {f"{self._group}/{p.topic}/{p.partition}": msgspec.json.encode(s) for p, s in changed.items()}
        write(self._cluster, TOPIC, values, of_consumer(self._group))
        self._noted |= changed

    def last(self) -> dict[Place, tuple[int, str]]:
        """The group's last recorded offset and the topic's id, by partition. Raises Unavailable."""
        noted = read(self._cluster).items()
        return {place: (max(s.start, s.at), s.topic_id) for (group, place), s in noted if group == self._group}


def read(cluster: Cluster) -> dict[tuple[str, Place], Subscribed]:
    """All recorded subscriptions, by group and partition; empty if there is no topic. Raises Unavailable."""
    records = [parsed(key.decode("utf-8", "replace"), value) for key, value in newest(cluster, TOPIC).items()]
    return {(noted[0], noted[1]): noted[2] for noted in records if noted is not None}


def parsed(key: str, value: bytes | None) -> tuple[str, Place, Subscribed] | None:
    """Group, partition and subscription of a record; None for a record of a later version or another tool."""
    try:
        group, topic, partition = key.split("/")
        return group, Place(topic, int(partition)), msgspec.json.decode(value or b"", type=Subscribed)
    except (ValueError, *UNDECODABLE):
        return None
