"""Kafka's brokers: making topics, reading a compacted one, and what their errors mean."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, NotifyError, Unavailable, stale_epoch
from notify.kafka.cluster import Cluster

CALL_SECONDS = 20.0
FETCH_MILLISECONDS = 20
"""How long a broker may wait for further records before it says that a partition ends. The default is half a second."""
LEAST_OF_BROKERS = 1_048_588
"""`message.max.bytes` of brokers that nobody has configured."""
FOR_NOW = frozenset(
    (
        KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE,
        KafkaError.REQUEST_TIMED_OUT, KafkaError.NOT_CONTROLLER, KafkaError.NETWORK_EXCEPTION,
        KafkaError.THROTTLING_QUOTA_EXCEEDED, KafkaError.BROKER_NOT_AVAILABLE, KafkaError.INVALID_REPLICATION_FACTOR,
    )
)  # fmt: skip
"""Errors with which a topic is not made for now: too few brokers are there for its copies, too."""


def translated(error: Any) -> NotifyError:
    """An error of Kafka's client as ours: Conflict for a publisher that is fenced, else Unavailable."""
    if isinstance(error, KafkaError):
        if error.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
            return stale_epoch("another bridge of this source publishes now; stop one of the two")
        return Unavailable(f"Kafka: {error.str()}")
    return Unavailable(f"Kafka: {error}")


def make_topics(cluster: Cluster, names: list[str], *, compacted: bool = False, largest: int = 0) -> None:
    """Make topics that are missing, with the partitions that the cluster's settings say (compacted ones: one).

    `largest`: bytes of a record that they have to take, 0: whatever the brokers say. Raises Unavailable where the
    brokers do not answer or cannot do it now, InvalidRequest where they refuse.
    """
    admin = cluster.admin()
    try:
        known = admin.list_topics(timeout=CALL_SECONDS).topics
    except KafkaException as raised:
        raise Unavailable(f"Kafka at {cluster.brokers} does not answer: {raised.args[0].str()}") from raised
    config = {"cleanup.policy": "compact"} if compacted else {}
    if largest > LEAST_OF_BROKERS:
        config["max.message.bytes"] = str(largest)
    partitions = 1 if compacted else cluster.partitions
    wanted = [NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config) for name in names]
    missing = [topic for topic in wanted if topic.topic not in known]
    made = admin.create_topics(missing) if missing else {}
    for name, done in made.items():
        try:
            done.result(CALL_SECONDS)
        except KafkaException as raised:
            error = raised.args[0]
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.code() in FOR_NOW:
                raise Unavailable(f"Kafka does not make topic {name!r} now: {error.str()}") from raised
            raise InvalidRequest(
                f"Kafka refuses to make topic {name!r}: {error.str()}. Make it, or rename it", "no_topic"
            ) from raised


def latest(cluster: Cluster, topic: str, key: bytes, *, whole: bool = False) -> bytes | None:
    """The last committed value of a key in a compacted topic of one partition; None where there is none.

    `whole`: wait for the outcome of transactions that are open. Raises Unavailable.
    """
    value: bytes | None = None
    for message in _read_through(cluster, topic, whole):
        if message.key() == key:
            value = message.value()
    return value


def newest(cluster: Cluster, topic: str) -> dict[bytes, bytes]:
    """The last committed value of each key in a compacted topic of one partition; empty where there is no such topic.

    Raises Unavailable.
    """
    try:
        values: dict[bytes, bytes] = {}
        for message in _read_through(cluster, topic, whole=False):
            key, value = message.key() or b"", message.value()
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        return values
    except KafkaException as raised:
        raise translated(raised.args[0]) from raised


def _read_through(cluster: Cluster, topic: str, whole: bool) -> list[Message]:
    """Every committed record of partition 0 up to where it ended when this was called; none if there is no topic."""
    partition = TopicPartition(topic, 0, OFFSET_BEGINNING)
    if topic not in cluster.admin().list_topics(timeout=CALL_SECONDS).topics:
        return []
    until = _end(cluster, partition) if whole else 0
    own = {"group.id": "notify-positions", "enable.partition.eof": True, "fetch.wait.max.ms": FETCH_MILLISECONDS}
    consumer = cluster.consumer(own)
    records: list[Message] = []
    try:
        consumer.assign([partition])
        deadline = time.monotonic() + CALL_SECONDS
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                if (message.offset() or 0) >= until:
                    return records
            elif not error.retriable():
                raise KafkaException(error)
        raise Unavailable(f"Kafka does not give topic {topic!r} within {CALL_SECONDS:g} s")
    finally:
        consumer.close()


def _end(cluster: Cluster, partition: TopicPartition) -> int:
    """The offset behind the last record of a partition, those of open transactions included."""
    consumer = cluster.consumer({"group.id": "notify-positions", "isolation.level": "read_uncommitted"})
    try:
        return int(consumer.get_watermark_offsets(partition, timeout=CALL_SECONDS)[1])
    finally:
        consumer.close()
