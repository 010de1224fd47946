"""Reads and writes topics of one partition, most of them compacted: the last value of one key, or of all keys.

A busy source writes a record for each batch, and brokers compact only records that are older than a day. So the last
value of a key is searched from the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition

from notify.errors import Unavailable
from notify.kafka.answers import answered
from notify.kafka.brokers import CALL_SECONDS, known_topics, translated
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY, GONE
from notify.kafka.reading import arrived, reader
from notify.kafka.rights import Needs, of_reader

LAST_RECORDS = 1000
"""How many offsets are read first, from the end; each time that the key is not among them, four times as many."""
AT_ONCE = 1000
POLL_SECONDS = 1.0
PASSING = AWAY | GONE | {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
"""Temporary errors of reading: brokers are away, or do not know a new topic yet."""


def latest(cluster: Cluster, topic: str, key: bytes, *, whole: bool = False, must_see: bool = False) -> bytes | None:
    """The last committed value of a key; None if there is none.

    `whole`: wait for the outcome of open transactions. `must_see`: raise if this user may not see the topic. Raises
    Unavailable, KafkaException.
    """
    reading = _Reading.of(cluster, topic, whole=whole)
    if reading is None:
        if must_see:
            _check_missing(cluster, topic)
        return None
    with reading:
        end, records = reading.end, LAST_RECORDS
        while True:
            start = max(reading.begin, end - records)
            last: Message | None = None
            for message in reading.records(start):
                if message.key() == key:
                    last = message
            if last is not None:
                return last.value()
            if start <= reading.begin:
                return None
            records *= 4


def newest(cluster: Cluster, topic: str) -> dict[bytes, bytes]:
    """The last committed value of each key; empty if there is no such topic. Raises Unavailable."""
    values: dict[bytes, bytes] = {}
    for message in every(cluster, topic):
        key, value = message.key() or b"", message.value()
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


def every(cluster: Cluster, topic: str) -> Iterator[Message]:
    """The committed records up to the present end; none if there is no such topic. Raises Unavailable."""
    try:
        reading = _Reading.of(cluster, topic)
        if reading is not None:
            with reading:
                yield from reading.records(reading.begin)
    except KafkaException as raised:
        raise translated(raised.args[0], cluster, of_reader(topic)) from raised


def write(cluster: Cluster, topic: str, values: Mapping[str, bytes], needs: Needs) -> None:
    """Write the values of keys; they are durable when it returns. `needs`: the rights to name if one is missing.

    Raises Unavailable if Kafka does not accept all values, Forbidden, Unauthorized.
    """
    failed: list[str] = []
    try:
        producer = cluster.producer({"acks": "all"})
        for key, value in values.items():
            producer.produce(
                topic,
                value,
                key.encode(),
                on_delivery=lambda error, _: failed.append(error.str()) if error is not None else None,
            )
        unanswered = producer.flush(CALL_SECONDS)
    except KafkaException as raised:
        raise translated(raised.args[0], cluster, needs) from raised
    if failed or unanswered:
        reason = f": {failed[0]}" if failed else f" within {CALL_SECONDS:g} s"
        raise Unavailable(f"Kafka does not accept the records for topic {topic!r}{reason}")


def _check_missing(cluster: Cluster, topic: str) -> None:
    """Raises KafkaException if the topic is not listed because this user may not see it."""
    admin = cluster.admin()
    described = admin.describe_topics(TopicCollection([topic]), request_timeout=CALL_SECONDS)
    try:
        answered(described[topic], CALL_SECONDS)
    except KafkaException as raised:
        if raised.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise


class _Reading:
    """Partition 0 of a topic, up to its end when this object was made."""

    def __init__(self, consumer: Consumer, topic: str, until: int) -> None:
        self._consumer = consumer
        self._topic = topic
        self._until = until
        self.begin, self.end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=CALL_SECONDS)
        """The first offset, and the offset after the last record whose transaction has ended."""

    @classmethod
    def of(cls, cluster: Cluster, topic: str, *, whole: bool = False) -> _Reading | None:
        """A reading of a topic; None if there is no such topic. `whole`: include the transactions that are open now."""
        if topic not in known_topics(cluster):
            return None
        until = _end(cluster, topic) if whole else 0
        return cls(reader(cluster, "notify-positions"), topic, until)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def records(self, start: int) -> Iterator[Message]:
        """The committed records from an offset on. Raises KafkaException; Unavailable if no record arrives for long."""
        self._consumer.assign([TopicPartition(self._topic, 0, start)])
        deadline = time.monotonic() + CALL_SECONDS
        while time.monotonic() < deadline:
            for message in arrived(self._consumer, AT_ONCE, POLL_SECONDS):
                error = message.error()
                if error is None:
                    deadline = time.monotonic() + CALL_SECONDS
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    if (message.offset() or 0) >= self._until:
                        return
                elif not (error.retriable() or error.code() in PASSING):
                    raise KafkaException(error)
        raise Unavailable(f"Kafka gives nothing more of topic {self._topic!r} for {CALL_SECONDS:g} s, and not its end")


def _end(cluster: Cluster, topic: str) -> int:
    """The offset after the last record, including records of open transactions."""
    consumer = cluster.consumer({"group.id": "notify-positions", "isolation.level": "read_uncommitted"})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=CALL_SECONDS)[1])
    finally:
        consumer.close()
