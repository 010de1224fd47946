"""Offsets of Kafka's partitions as a reader of committed records sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition, admin

from notify.kafka.answers import offset_of
from notify.kafka.codes import GONE
from notify.server.groups.kafka.answers import CALL_SECONDS, PASSING, gathered

Place = tuple[str, int]
"""A topic and a partition of it."""
_Spec: Any = admin.OffsetSpec  # type: ignore[attr-defined]


def earliest(client: admin.AdminClient, places: Iterable[Place], unknown: set[str] | None = None) -> dict[Place, int]:
    """The first offset of each partition; one that is gone is left out. Raises KafkaException, TimeoutError.

    `unknown`: where topics are noted whose partitions have no leader now; without it that raises.
    """
    return _asked(client, places, _Spec.earliest(), unknown)


def latest(client: admin.AdminClient, places: Iterable[Place], unknown: set[str] | None = None) -> dict[Place, int]:
    """The offset behind the last committed record of each. `unknown`, and what it raises: as above."""
    return _asked(client, places, _Spec.latest(), unknown)


def at_time(client: admin.AdminClient, places: Iterable[Place], at_us: int) -> dict[Place, int]:
    """The first offset of each with a record from `at_us` on; -1 where there is none. Raises as above."""
    return _asked(client, places, _Spec.for_timestamp(at_us // 1000), None)


def whole(offsets: dict[Place, int], places: Iterable[Place]) -> dict[Place, int]:
    """These offsets, if they are of all these partitions, whose topics are there.

    Raises KafkaException otherwise, so that the brokers are asked again: one that has just started knows no topic yet,
    and to take its word would send a letter again, or forget a wish.
    """
    for place in places:
        if place not in offsets:
            text = f"a broker does not know partition {place[1]} of {place[0]}"
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
    return offsets


def _asked(client: admin.AdminClient, places: Iterable[Place], spec: Any, unknown: set[str] | None) -> dict[Place, int]:
    asked = {TopicPartition(*place): spec for place in places}
    if not asked:
        return {}
    level = IsolationLevel.READ_COMMITTED
    answers = gathered(client.list_offsets(asked, isolation_level=level, request_timeout=CALL_SECONDS))
    offsets: dict[Place, int] = {}
    for partition, said in answers.items():
        try:
            offsets[partition.topic, partition.partition] = _told(client, partition.topic, said)
        except KafkaException as raised:
            code = raised.args[0].code()
            if unknown is not None and code in PASSING:
                unknown.add(partition.topic)
            elif code not in GONE:
                raise
    return offsets


def _told(client: admin.AdminClient, topic: str, said: Any) -> int:
    """The offset that an answer tells. Raises KafkaException."""
    if not isinstance(said, KafkaError):
        return offset_of(said)
    if said.code() != KafkaError._NOENT:
        raise KafkaException(said)
    # The client met no leader of any partition that it was asked for; it does not say why.
    is_there = topic in client.list_topics(timeout=CALL_SECONDS).topics
    raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE if is_there else KafkaError.UNKNOWN_TOPIC_OR_PART))
