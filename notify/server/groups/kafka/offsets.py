"""Offsets of Kafka's partitions for a reader of committed records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition, admin

from notify.kafka.calls import offset_of
from notify.kafka.codes import GONE
from notify.server.groups.kafka.answers import CALL_SECONDS, PASSING, gathered

Place = tuple[str, int]
"""(topic, partition)."""
_Spec: Any = admin.OffsetSpec  # type: ignore[attr-defined]


def earliest(client: admin.AdminClient, places: Iterable[Place], unknown: set[str] | None = None) -> dict[Place, int]:
    """The first offset of each partition; a deleted one is left out. Raises KafkaException, TimeoutError.

    `unknown`: a set that gets the topics whose partitions have no leader now; with None such a topic raises.
    """
    return _asked(client, places, _Spec.earliest(), unknown)


def latest(client: admin.AdminClient, places: Iterable[Place], unknown: set[str] | None = None) -> dict[Place, int]:
    """The offset after the last committed record of each partition. `unknown` and errors: as for `earliest`."""
    return _asked(client, places, _Spec.latest(), unknown)


def ends(client: admin.AdminClient, places: Iterable[Place], unknown: set[str] | None = None) -> dict[Place, int]:
    """The offset after the last record of each partition, those of open transactions too. `unknown` and errors: as for
    `earliest`."""
    return _asked(client, places, _Spec.latest(), unknown, IsolationLevel.READ_UNCOMMITTED)


def at_time(client: admin.AdminClient, places: Iterable[Place], at_us: int) -> dict[Place, int]:
    """The first offset of each partition with a record from `at_us` on, or -1. Raises as `earliest`."""
    return _asked(client, places, _Spec.for_timestamp(at_us // 1000), None)


def whole(offsets: dict[Place, int], places: Iterable[Place]) -> dict[Place, int]:
    """These offsets, if each of the partitions has one.

    Raises KafkaException otherwise, so that the brokers are asked again: a broker that has just started knows no topic
    yet, and its answer would have a letter redriven twice, or a wish forgotten.
    """
    for place in places:
        if place not in offsets:
            text = f"a broker does not know partition {place[1]} of {place[0]}"
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
    return offsets


def _asked(
    client: admin.AdminClient,
    places: Iterable[Place],
    spec: Any,
    unknown: set[str] | None,
    level: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    asked = {TopicPartition(*place): spec for place in places}
    if not asked:
        return {}
    answers = gathered(client.list_offsets(asked, isolation_level=level, request_timeout=CALL_SECONDS))
    offsets: dict[Place, int] = {}
    for partition, answer in answers.items():
        try:
            offsets[partition.topic, partition.partition] = _offset(client, partition.topic, answer)
        except KafkaException as raised:
            code = raised.args[0].code()
            if unknown is not None and code in PASSING:
                unknown.add(partition.topic)
            elif code not in GONE:
                raise
    return offsets


def _offset(client: admin.AdminClient, topic: str, listed: Any) -> int:
    """The offset in an answer. Raises KafkaException."""
    if not isinstance(listed, KafkaError):
        return offset_of(listed)
    if listed.code() != KafkaError._NOENT:
        raise KafkaException(listed)
    # The client found no leader for any of the partitions, and does not say why.
    is_there = topic in client.list_topics(timeout=CALL_SECONDS).topics
    raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE if is_there else KafkaError.UNKNOWN_TOPIC_OR_PART))
