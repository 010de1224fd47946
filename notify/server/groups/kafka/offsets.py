"""Offsets of Kafka's partitions as a reader of committed records sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition, admin

CALL_SECONDS = 5.0
"""How long people wait for the brokers: shorter than bridges and consumers do."""
Place = tuple[str, int]
"""A topic and a partition of it."""
_Spec: Any = admin.OffsetSpec  # type: ignore[attr-defined]


def earliest(client: admin.AdminClient, places: Iterable[Place]) -> dict[Place, int]:
    """The first offset of each partition; one that is gone is left out. Raises KafkaException."""
    return _asked(client, places, _Spec.earliest())


def latest(client: admin.AdminClient, places: Iterable[Place]) -> dict[Place, int]:
    """The offset behind the last committed record of each. Raises KafkaException."""
    return _asked(client, places, _Spec.latest())


def at_time(client: admin.AdminClient, places: Iterable[Place], at_us: int) -> dict[Place, int]:
    """The first offset of each with a record from `at_us` on; -1 where there is none. Raises KafkaException."""
    return _asked(client, places, _Spec.for_timestamp(at_us // 1000))


def _asked(client: admin.AdminClient, places: Iterable[Place], spec: Any) -> dict[Place, int]:
    asked = {TopicPartition(*place): spec for place in places}
    if not asked:
        return {}
    level = IsolationLevel.READ_COMMITTED
    offsets: dict[Place, int] = {}
    answers = client.list_offsets(asked, isolation_level=level, request_timeout=CALL_SECONDS)
    for partition, answer in answers.items():
        try:
            offsets[partition.topic, partition.partition] = answer.result(CALL_SECONDS).offset
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return offsets
