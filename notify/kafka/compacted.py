"""Reading compacted topics of one partition: the last value of one key, or of each.

A busy source writes a record for each batch, and brokers compact only what is older than a day: the last value of a
key is looked for from the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition

from notify.errors import Unavailable
from notify.kafka.answers import answered
from notify.kafka.brokers import CALL_SECONDS, known_topics, translated
from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_reader

FETCH_MILLISECONDS = 20
"""How long a broker may wait for further records before it says that a partition ends. The default is half a second."""
LAST_RECORDS = 1000
"""So many offsets are read first, from the end; each time that the key is not among them, four times as many."""
AT_ONCE = 1000
POLL_SECONDS = 1.0
PASSING = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
        KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE,
    )
)  # fmt: skip
"""Errors of reading that pass: brokers are away, or do not know yet a topic that was made a moment ago."""


def latest(cluster: Cluster, topic: str, key: bytes, *, whole: bool = False, must_see: bool = False) -> bytes | None:
    """The last committed value of a key; None where there is none.

    `whole`: wait for the outcome of transactions that are open. `must_see`: a topic that this user may not see is no
    missing one. Raises Unavailable, KafkaException.
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
    """The last committed value of each key; empty where there is no such topic. Raises Unavailable."""
    try:
        reading = _Reading.of(cluster, topic)
        if reading is None:
            return {}
        values: dict[bytes, bytes] = {}
        with reading:
            for message in reading.records(reading.begin):
                key, value = message.key() or b"", message.value()
                if value is None:
                    values.pop(key, None)
                else:
                    values[key] = value
        return values
    except KafkaException as raised:
        raise translated(raised.args[0], cluster, of_reader(topic)) from raised


def _check_missing(cluster: Cluster, topic: str) -> None:
    """Raises KafkaException for a topic that is not listed because this user may not see it."""
    admin = cluster.admin()
    described = admin.describe_topics(TopicCollection([topic]), request_timeout=CALL_SECONDS)
    try:
        answered(described[topic], CALL_SECONDS)
    except KafkaException as raised:
        if raised.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise


class _Reading:
    """Partition 0 of a topic, up to where it ended when this was made."""

    def __init__(self, consumer: Consumer, topic: str, until: int) -> None:
        self._consumer = consumer
        self._topic = topic
        self._until = until
        self.begin, self.end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=CALL_SECONDS)
        """The first offset that there is, and the one behind the last record whose transaction has ended."""

    @classmethod
    def of(cls, cluster: Cluster, topic: str, *, whole: bool = False) -> _Reading | None:
        """None where there is no such topic. `whole`: up to behind the transactions that are open now."""
        if topic not in known_topics(cluster):
            return None
        until = _end(cluster, topic) if whole else 0
        own = {"group.id": "notify-positions", "enable.partition.eof": True, "fetch.wait.max.ms": FETCH_MILLISECONDS}
        return cls(cluster.consumer(own), topic, until)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def records(self, start: int) -> Iterator[Message]:
        """Every committed record from an offset on. Raises KafkaException, Unavailable where none comes for long."""
        self._consumer.assign([TopicPartition(self._topic, 0, start)])
        deadline = time.monotonic() + CALL_SECONDS
        while time.monotonic() < deadline:
            first = self._consumer.poll(POLL_SECONDS)
            if first is None:
                continue
            for message in (first, *self._consumer.consume(AT_ONCE, 0)):  # what has arrived; it would wait for more
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
    """The offset behind the last record, those of open transactions included."""
    consumer = cluster.consumer({"group.id": "notify-positions", "isolation.level": "read_uncommitted"})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=CALL_SECONDS)[1])
    finally:
        consumer.close()
