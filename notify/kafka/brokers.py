"""Kafka's brokers: making topics, reading a compacted one, and what their errors mean."""

from __future__ import annotations

import time

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import NewTopic, TopicMetadata  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, NotifyError, Unauthorized, Unavailable, stale_epoch
from notify.kafka.answers import answered
from notify.kafka.cluster import Cluster
from notify.kafka.hindrance import LOGIN, hindrance, refusal
from notify.kafka.rights import REFUSED, Needs, missing, of_reader, user_of

CALL_SECONDS = 20.0
FIRST_ANSWER_SECONDS = 2.0
"""After so long it is asked why there is no answer."""
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


SILENT = frozenset((KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE))
"""Errors that only say that there is no answer."""


def translated(error: KafkaError, cluster: Cluster, needs: Needs) -> NotifyError:
    """An error of Kafka's client as ours, in a sentence that says what to do.

    Conflict for a publisher that is fenced, Unauthorized for a login or certificate that is refused, Forbidden where a
    right is missing, else Unavailable. Where there is no answer the brokers are asked why, which takes some seconds.
    """
    code = error.code()
    if code in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
        return stale_epoch("another bridge of this source publishes now; stop one of the two")
    if code in LOGIN or code == KafkaError._SSL:
        return refusal(error, cluster)
    if code in SILENT and (reason := hindrance(cluster)) is not None:
        return reason
    return missing(error, cluster, needs) or Unavailable(f"Kafka: {error.str()}")


def known_topics(cluster: Cluster, seconds: float = CALL_SECONDS) -> dict[str, TopicMetadata]:
    """The topics that this user may see, by name.

    Raises Unavailable where the brokers do not answer for so long, and Unauthorized at once where they refuse to.
    """
    admin = cluster.admin()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return admin.list_topics(timeout=min(seconds, FIRST_ANSWER_SECONDS)).topics
        except KafkaException as raised:
            reason = hindrance(cluster)
            if isinstance(reason, Unauthorized):
                raise reason from raised
            if time.monotonic() > deadline:
                silent = Unavailable(f"Kafka at {cluster.brokers} does not answer: {raised.args[0].str()}")
                raise reason or silent from raised


def make_topics(cluster: Cluster, names: list[str], *, compacted: bool = False, largest: int = 0) -> None:
    """Make topics that are missing, with the partitions that the cluster's settings say (compacted ones: one).

    `largest`: bytes of a record that they have to take, 0: whatever the brokers say. Raises Unavailable where the
    brokers do not answer or cannot do it now, InvalidRequest where they refuse.
    """
    known = known_topics(cluster)
    config = {"cleanup.policy": "compact"} if compacted else {}
    if largest > LEAST_OF_BROKERS:
        config["max.message.bytes"] = str(largest)
    partitions = 1 if compacted else cluster.partitions
    wanted = [NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config) for name in names]
    missing = [topic for topic in wanted if topic.topic not in known]
    admin = cluster.admin()
    made = admin.create_topics(missing, request_timeout=CALL_SECONDS) if missing else {}
    for name, done in made.items():
        try:
            answered(done, CALL_SECONDS)
        except KafkaException as raised:
            error = raised.args[0]
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.code() in FOR_NOW:
                raise Unavailable(f"Kafka does not make topic {name!r} now: {error.str()}") from raised
            raise not_made(name, error, cluster) from raised


def not_made(name: str, error: KafkaError, cluster: Cluster) -> InvalidRequest:
    """The sentence for a topic that the brokers refuse to make."""
    if error.code() in REFUSED:
        return InvalidRequest(
            f"Kafka shows no topic {name!r} to {user_of(cluster)}, and refuses to make it: grant Create on the topic, "
            "or Describe where it exists",
            "no_topic",
        )
    return InvalidRequest(f"Kafka refuses to make topic {name!r}: {error.str()}. Make it, or rename it", "no_topic")


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
        raise translated(raised.args[0], cluster, of_reader(topic)) from raised


def _read_through(cluster: Cluster, topic: str, whole: bool) -> list[Message]:
    """Every committed record of partition 0 up to where it ended when this was called; none if there is no topic."""
    partition = TopicPartition(topic, 0, OFFSET_BEGINNING)
    if topic not in known_topics(cluster):
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
