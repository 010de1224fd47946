"""Kafka's brokers: making topics, reading a compacted one, and what their errors mean."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, NotifyError, Unavailable, stale_epoch
from notify.kafka.cluster import Cluster

CALL_SECONDS = 20.0


def translated(error: Any) -> NotifyError:
    """An error of Kafka's client as ours: Conflict for a publisher that is fenced, else Unavailable."""
    if isinstance(error, KafkaError):
        if error.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
            return stale_epoch("another bridge of this source publishes now; stop one of the two")
        return Unavailable(f"Kafka: {error.str()}")
    return Unavailable(f"Kafka: {error}")


def make_topics(cluster: Cluster, names: list[str], *, compacted: bool = False) -> None:
    """Make topics that are missing, with the brokers' default partitions (compacted ones: one).

    Raises Unavailable where the brokers do not answer, InvalidRequest where they refuse.
    """
    admin = cluster.admin()
    try:
        known = admin.list_topics(timeout=CALL_SECONDS).topics
    except KafkaException as raised:
        raise Unavailable(f"Kafka at {cluster.brokers} does not answer: {raised.args[0].str()}") from raised
    config = {"cleanup.policy": "compact"} if compacted else {}
    partitions = 1 if compacted else -1
    wanted = [NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config) for name in names]
    missing = [topic for topic in wanted if topic.topic not in known]
    made = admin.create_topics(missing) if missing else {}
    for name, done in made.items():
        try:
            done.result(CALL_SECONDS)
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise InvalidRequest(f"Kafka refuses to make topic {name!r}: {raised.args[0].str()}") from raised


def latest(cluster: Cluster, topic: str, key: bytes) -> bytes | None:
    """The last committed value of a key in a compacted topic of one partition; None where there is none."""
    value: bytes | None = None
    for message in _read_through(cluster, topic):
        if message.key() == key:
            value = message.value()
    return value


def newest(cluster: Cluster, topic: str) -> dict[bytes, bytes]:
    """The last committed value of each key in a compacted topic of one partition; empty where there is no such topic.

    Raises Unavailable.
    """
    try:
        if topic not in cluster.admin().list_topics(timeout=CALL_SECONDS).topics:
            return {}
        values: dict[bytes, bytes] = {}
        for message in _read_through(cluster, topic):
            key, value = message.key() or b"", message.value()
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        return values
    except KafkaException as raised:
        raise translated(raised.args[0]) from raised


def _read_through(cluster: Cluster, topic: str) -> list[Message]:
    """Every committed record of partition 0 up to where it ended when this was called."""
    consumer = cluster.consumer({"group.id": "notify-positions", "enable.partition.eof": True})
    found: list[Message] = []
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + CALL_SECONDS
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                return found
            elif not error.retriable():
                raise KafkaException(error)
        raise Unavailable(f"Kafka does not give topic {topic!r} within {CALL_SECONDS:g} s")
    finally:
        consumer.close()
