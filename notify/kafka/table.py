"""Tables in compacted topics of one partition: the last record of a key is its row.

A busy source writes a record for each batch, and brokers compact only records that are older than a day. So the last
value of one key is searched from the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition

from notify.errors import InvalidRequest, Unavailable
from notify.kafka.brokers import CALL_SECONDS, known_topics, make_topics, translated
from notify.kafka.calls import answered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY, GONE
from notify.kafka.rights import Needs, of_reader
from notify.protocol.wire import UNDECODABLE

K = TypeVar("K")
V = TypeVar("V")

PARTITION = 0
"""The partition of a table's records, however many its topic has: an administrator may add some, or have made it."""
LAST_RECORDS = 1000
"""How many offsets are read first, from the end; each time that the key is not among them, four times as many."""
AT_ONCE = 1000
POLL_SECONDS = 1.0
PASSING = AWAY | GONE | {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
"""Temporary errors of reading: brokers are unreachable, or do not know a new topic yet."""
FETCH_MILLISECONDS = 20
"""How long a broker waits for more records before it reports a partition's end. The default is half a second."""


class KafkaTable(Generic[K, V]):
    """A table of one topic, whose keys are texts there. A key of another form belongs to another tool's record."""

    def __init__(
        self,
        topic: str,
        encode: Callable[[V], bytes],
        decode: Callable[[bytes], V],
        text_of: Callable[[K], str] = str,
        key_of: Callable[[str], K | None] = lambda text: text,  # type: ignore[assignment, return-value]
    ) -> None:
        """`key_of`: the key that a text stands for, or None."""
        self.topic = topic
        self._encode, self._decode = encode, decode
        self._text_of, self._key_of = text_of, key_of

    @classmethod
    def of_json(cls, topic: str, kind: type[V], **keys: Any) -> KafkaTable[K, V]:
        """A table whose values are JSON of a type."""
        return cls(topic, msgspec.json.encode, msgspec.json.Decoder(kind).decode, **keys)

    def record(self, key: K, value: V) -> tuple[bytes, bytes]:
        """Key and value of the record that makes a row. Raises the errors of encoding."""
        return self._text_of(key).encode(), self._encode(value)

    def row(self, key: str | bytes, value: bytes | None) -> tuple[K, V] | None:
        """The row of a record; None for another tool's key.

        Raises InvalidRequest for a value that cannot be read: a later version or another tool wrote it.
        """
        own = self._key_of(key if isinstance(key, str) else key.decode("utf-8", "replace"))
        if own is None:
            return None
        try:
            return own, self._decode(value or b"")
        except UNDECODABLE as error:
            raise InvalidRequest(f"a record of {self.topic} cannot be read: {error}") from None

    def make(self, cluster: Cluster) -> None:
        """Make the topic if it is missing. Raises Unavailable; InvalidRequest if the brokers refuse."""
        make_topics(cluster, [self.topic], compacted=True)

    def rows(self, cluster: Cluster) -> dict[K, V]:
        """All rows that can be read; none if there is no topic. Raises Unavailable."""
        rows: dict[K, V] = {}
        for key, value in newest(cluster, self.topic).items():
            try:
                row = self.row(key, value)
            except InvalidRequest:
                continue
            if row is not None:
                rows[row[0]] = row[1]
        return rows

    def put(self, cluster: Cluster, rows: Mapping[K, V], needs: Needs) -> None:
        """Write rows. Errors and `needs`: as for `write`."""
        write(cluster, self.topic, dict(self.record(*row) for row in rows.items()), needs)


def reader(cluster: Cluster, group: str, own: Mapping[str, Any] = MappingProxyType({})) -> Consumer:
    """A consumer of committed records that reports the ends of partitions, and is not a member of a group.

    Kafka requires the name of a `group`, but nothing is committed. Raises InvalidRequest for settings that Kafka's
    client refuses.
    """
    return cluster.consumer(
        {"group.id": group, "enable.partition.eof": True, "fetch.wait.max.ms": FETCH_MILLISECONDS, **own}
    )


def arrived(consumer: Consumer, most: int, seconds: float) -> list[Message]:
    """Wait up to `seconds` for a record or an end, and return it with what else has arrived, at most `most`.

    The client's own method for several records waits until all have arrived, or for the whole time.
    """
    first = consumer.poll(seconds)
    return [] if first is None else [first, *consumer.consume(most - 1, 0)]


def latest(cluster: Cluster, topic: str, key: bytes) -> bytes | None:
    """The last committed value of a key; None if there is none. Raises Unavailable; KafkaException, also if this user
    may not see the topic."""
    reading = _Reading.of(cluster, topic)
    if reading is None:
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


def write(cluster: Cluster, topic: str, values: Mapping[bytes, bytes], needs: Needs) -> None:
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
                key,
                PARTITION,
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

    def __init__(self, consumer: Consumer, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic
        self.begin, self.end = consumer.get_watermark_offsets(TopicPartition(topic, PARTITION), timeout=CALL_SECONDS)
        """The first offset, and the offset after the last record whose transaction has ended."""

    @classmethod
    def of(cls, cluster: Cluster, topic: str) -> _Reading | None:
        """A reading of a topic; None if there is no such topic."""
        return cls(reader(cluster, "notify-positions"), topic) if topic in known_topics(cluster) else None

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def records(self, start: int) -> Iterator[Message]:
        """The committed records from an offset on. Raises KafkaException; Unavailable if no record arrives for long."""
        self._consumer.assign([TopicPartition(self._topic, PARTITION, start)])
        deadline = time.monotonic() + CALL_SECONDS
        while time.monotonic() < deadline:
            for message in arrived(self._consumer, AT_ONCE, POLL_SECONDS):
                error = message.error()
                if error is None:
                    # A topic that is written all the time has no moment at which the client reports its end.
                    offset = message.offset() or 0
                    if offset < self.end:
                        yield message
                    if offset + 1 >= self.end:
                        return
                    deadline = time.monotonic() + CALL_SECONDS
                elif error.code() == KafkaError._PARTITION_EOF:
                    return
                elif not (error.retriable() or error.code() in PASSING):
                    raise KafkaException(error)
        raise Unavailable(f"Kafka gives nothing more of topic {self._topic!r} for {CALL_SECONDS:g} s, and not its end")
