"""`notify_kafka`: Kafka topics that a bridge or relay publishes, as a Python Data Source of Spark.

    spark.dataSource.register(NotifyKafkaSource)
    spark.read.format("notify_kafka").option("brokers", "…").option("topics", "a,b").load()

Each committed record is a row (id, no, producer_group, topic, queue, offset, queued_us, key); `topic` is the topic's
index in the option. Records without the header `notify-id` are left out. Spark's own Kafka source needs jars of its
exact version; this one needs only the client that the SDK uses anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from notify.errors import Unavailable
from notify.kafka.records import GROUP, ID, header, listed

SCHEMA = (
    "id binary, no int, producer_group string, topic bigint, queue int, offset bigint, queued_us bigint, key binary"
)
_ARROW = pa.schema(
    [
        ("id", pa.binary()),
        ("no", pa.int32()),
        ("producer_group", pa.string()),
        ("topic", pa.int64()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("queued_us", pa.int64()),
        ("key", pa.binary()),
    ]
)
CALL_SECONDS = 30.0
AT_ONCE = 10_000


@dataclass
class Part(InputPartition):
    """Offsets [start, end) of a topic's partition."""

    topic: str
    number: int
    partition: int
    start: int
    end: int

    def __post_init__(self) -> None:
        self.value = f"{self.topic}/{self.partition}"


def consumer_of(brokers: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "notify-audit",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 2,
        }
    )


def parts_of(brokers: str, topics: Sequence[str]) -> list[Part]:
    """Every partition with its present offsets. Raises Unavailable if the brokers do not answer."""
    consumer = consumer_of(brokers)
    try:
        parts = []
        for number, name in enumerate(topics):
            metadata = consumer.list_topics(name, timeout=CALL_SECONDS).topics[name]
            for partition in sorted(metadata.partitions):
                low, high = consumer.get_watermark_offsets(TopicPartition(name, partition), timeout=CALL_SECONDS)
                parts.append(Part(name, number, partition, low, high))
        return parts
    except KafkaException as error:
        raise Unavailable(f"Kafka at {brokers}: {error.args[0].str()}") from error
    finally:
        consumer.close()


class NotifyKafkaSource(DataSource):
    """Options: `brokers`, and `topics`, names separated by commas."""

    @classmethod
    def name(cls) -> str:
        return "notify_kafka"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return _Reader(self.options["brokers"], self.options["topics"].split(","))


class _Reader(DataSourceReader):
    def __init__(self, brokers: str, topics: Sequence[str]) -> None:
        self._brokers = brokers
        self._topics = topics

    def partitions(self) -> Sequence[InputPartition]:
        return [p for p in parts_of(self._brokers, self._topics) if p.end > p.start]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        return read_part(self._brokers, partition)


def read_part(brokers: str, part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a part. Raises Unavailable if Kafka gives no record for CALL_SECONDS."""
    if part.end <= part.start:
        return
    consumer = consumer_of(brokers)
    try:
        consumer.assign([TopicPartition(part.topic, part.partition, part.start)])
        yield from _batches(consumer, part)
    finally:
        consumer.close()


def _batches(consumer: Consumer, part: Part) -> Iterator[pa.RecordBatch]:
    quiet_since = time.monotonic()
    rows: list[tuple[Any, ...]] = []
    while True:
        ended = False
        records = consumer.consume(AT_ONCE, 1.0)
        for record in records:
            error = record.error()
            if error is not None:
                # The end of the committed records: only markers and open transactions follow.
                if error.code() == KafkaError._PARTITION_EOF:
                    ended = True
                elif not error.retriable():
                    raise KafkaException(error)
                continue
            if (record.offset() or 0) >= part.end:
                ended = True
                break
            row = _row(record, part)
            if row is not None:
                rows.append(row)
        if records:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > CALL_SECONDS:
            raise Unavailable(f"Kafka gave no record of {part.value} for {CALL_SECONDS:g} s")
        if rows:
            columns = list(zip(*rows, strict=True))
            arrays = [pa.array(c, f.type) for c, f in zip(columns, _ARROW, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)
            rows = []
        if ended:
            return


def _row(record: Any, part: Part) -> tuple[Any, ...] | None:
    headers = listed(record)
    name = header(headers, ID)
    if name is None:
        return None
    transaction, _, number = name.partition(".")
    return (
        bytes.fromhex(transaction.replace("-", "")),
        int(number or 0),
        header(headers, GROUP) or None,
        part.number,
        part.partition,
        record.offset(),
        record.timestamp()[1] * 1000,
        record.key(),
    )
