"""`notify_kafka`: the Kafka topics of a bridge or relay as a Python Data Source of Spark.

    spark.dataSource.register(NotifyKafkaSource)
    spark.read.format("notify_kafka").option("url", "kafka://…").option("topics", "a,b").load()

Each committed record is a row, see SCHEMA; `topic` is the topic's index in the option. Records without a message id in
the header `notify-id` are left out, unless they are dead letters. If a batch of records fails its checksum, a row
without an id reports it in `damage`, and the readable records of the batch follow as rows. Spark's own Kafka source
needs jars of its exact version; this source needs only the client that the SDK already uses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from notify.errors import Unavailable
from notify.kafka import records
from notify.kafka.cluster import Cluster
from notify.kafka.groups import DEAD_LETTER
from notify.kafka.redriven import Spot, letter_id
from notify.spark.inputs.kafka_parts import CALL_SECONDS, Part, parts_of, reader_of
from notify.spark.inputs.letters import REASON_CHARACTERS

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
        ("tag", pa.string()),
        ("expires_us", pa.int64()),  # when the message expires; null without a ttl
        ("due_us", pa.int64()),  # when a delayed or failed message is due
        ("target", pa.string()),  # the topic of a delayed or failed message
        ("attempt", pa.int32()),  # of a failed message: the next one in a retry topic, the last one of a dead letter
        ("letter", pa.string()),  # the id of a dead letter; a dead letter from another tool's record has one, too
        ("reason", pa.string()),  # why the message is a dead letter
        ("damage", pa.string()),
    ]
)
_TYPES = {"int32": "int", "int64": "bigint"}
SCHEMA = ", ".join(f"{field.name} {_TYPES.get(str(field.type), str(field.type))}" for field in _ARROW)
RECORDS_A_CALL = 10_000
"""The most records that one call asks of the client, and about the most rows of a batch for Spark."""
POLL_SECONDS = 0.05
"""How long the client waits for RECORDS_A_CALL records, even at the end of the partition."""
QUIET_SECONDS = 5.0
"""After this time without a record, nothing more of a damaged batch can be read."""


class NotifyKafkaSource(DataSource):
    """The data source. Options: `url`, with every setting that the workers need (Spark never shows an option of this
    name), and either `topics`, names separated by commas, or `parts`, a JSON list of the fields of each Part."""

    @classmethod
    def name(cls) -> str:
        return "notify_kafka"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        url = self.options["url"]
        if "parts" in self.options:
            parts = [Part(*fields) for fields in json.loads(self.options["parts"])]
        else:
            parts = parts_of(Cluster.of(url), self.options["topics"].split(","))
        return _Reader(url, parts)


class _Reader(DataSourceReader):
    def __init__(self, url: str, parts: Sequence[Part]) -> None:
        self._url = url
        self._parts = parts

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(part) for part in self._parts if part.end > part.start]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(Cluster.of(self._url), partition.value)


def read_part(cluster: Cluster, part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a part. Raises Unavailable if Kafka sends no record for CALL_SECONDS."""
    if part.end <= part.start:
        return
    consumer = reader_of(cluster)
    try:
        consumer.assign([TopicPartition(part.topic, part.partition, part.start)])
        yield from _batches(cluster, consumer, part)
    finally:
        consumer.close()


def _batches(cluster: Cluster, consumer: Consumer, part: Part) -> Iterator[pa.RecordBatch]:
    quiet_since = time.monotonic()
    ended = False
    rows: list[tuple[Any, ...]] = []
    while not ended:
        received = consumer.consume(RECORDS_A_CALL, POLL_SECONDS)
        for record in received:
            error = record.error()
            if error is not None:
                # This is the end of the committed records: only markers and open transactions follow.
                if error.code() == KafkaError._PARTITION_EOF:
                    ended = True
                elif error.code() == KafkaError._BAD_MSG:
                    first = record.offset() or 0
                    following = good_from(cluster, part, first)
                    rows += _damaged(cluster, part, first, following)
                    ended = following >= part.end
                    consumer.assign([TopicPartition(part.topic, part.partition, following)])
                    break  # the other records report the same damage
                elif not error.retriable():
                    raise KafkaException(error)
            elif (record.offset() or 0) >= part.end:
                ended = True
                break
            else:
                rows += _row(record, part)
        if received:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > CALL_SECONDS:
            raise Unavailable(f"Kafka gave no record of {part.place} for {CALL_SECONDS:g} s")
        if rows and (ended or len(rows) >= RECORDS_A_CALL):
            columns = zip(*rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)
            rows = []


def _damaged(cluster: Cluster, part: Part, first: int, following: int) -> list[tuple[Any, ...]]:
    """A row that reports a damaged batch, and the rows of its readable records."""
    detail = f"the batch at offsets {first} to {following - 1} of {part.place} fails its checksum"
    rows: list[tuple[Any, ...]] = []
    queued_us: int | None = None
    for record in read_unchecked(cluster, part, first, following):
        queued_us = queued_us or record.timestamp()[1] * 1000
        rows += _row(record, part)
    nothing = (None,) * 7
    report = (None, None, None, part.number, part.partition, first, queued_us, None, *nothing, detail)
    return [report, *rows]


def _row(record: Any, part: Part) -> list[tuple[Any, ...]]:
    """The row of a record; an empty list if the record has no message id and is not a dead letter."""
    headers = records.listed(record)
    message_id = records.header(headers, records.ID) or ""
    identity = _identity(message_id)
    is_letter = part.topic.startswith(DEAD_LETTER)
    if identity is None and not is_letter:
        return []
    return [
        (
            *(identity or (None, None)),
            records.header(headers, records.GROUP) or None,
            part.number,
            part.partition,
            record.offset(),
            record.timestamp()[1] * 1000,
            record.key(),
            records.header(headers, records.TAG),
            records.number(headers, records.EXPIRES),
            records.number(headers, records.DUE),
            records.header(headers, records.TARGET),
            records.number(headers, records.ATTEMPT),
            letter_id(message_id, Spot(part.partition, record.offset())) if is_letter else None,
            (records.header(headers, records.REASON) or "")[:REASON_CHARACTERS] if is_letter else None,
            None,
        )
    ]


def _identity(message_id: str) -> tuple[bytes, int] | None:
    """Transaction id and number of a message; None if another tool made the id."""
    transaction, _, number = message_id.partition(".")
    try:
        identity = bytes.fromhex(transaction.replace("-", ""))
        return (identity, int(number or 0)) if len(identity) == 16 else None
    except ValueError:
        return None


# --- batches that fail their checksum -----------------------------------------------------------------------------


def good_from(cluster: Cluster, part: Part, first: int) -> int:
    """The first offset after the damaged batch that begins at `first`; at most the end of the part.

    Brokers send only whole batches, and the client reports only where a damaged batch begins. A binary search finds its
    end.
    """
    consumer = reader_of(cluster)
    try:
        bad, step = first, 1
        while bad + step < part.end and _is_in(consumer, part, first, bad + step):
            bad, step = bad + step, 2 * step
        good = min(bad + step, part.end)
        while good - bad > 1:
            middle = (bad + good) // 2
            if _is_in(consumer, part, first, middle):
                bad = middle
            else:
                good = middle
        return good
    finally:
        consumer.close()


def _is_in(consumer: Consumer, part: Part, first: int, offset: int) -> bool:
    """Whether an offset is in the damaged batch that begins at `first`."""
    consumer.assign([TopicPartition(part.topic, part.partition, offset)])
    deadline = time.monotonic() + CALL_SECONDS
    while time.monotonic() < deadline:
        for record in consumer.consume(1, 1.0):
            error = record.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                return False
            if error.code() == KafkaError._BAD_MSG:
                return record.offset() == first
            if not error.retriable():
                raise KafkaException(error)
    raise Unavailable(f"Kafka gave no record of {part.place} for {CALL_SECONDS:g} s")


def read_unchecked(cluster: Cluster, part: Part, first: int, end: int) -> list[Any]:
    """The readable records of a damaged batch."""
    consumer = reader_of(cluster, **{"check.crcs": False})
    readable: list[Any] = []
    try:
        consumer.assign([TopicPartition(part.topic, part.partition, first)])
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < QUIET_SECONDS:
            for record in consumer.consume(end - first, 0.1):
                if record.error() is not None or (record.offset() or 0) >= end:
                    return readable
                readable.append(record)
                quiet_since = time.monotonic()
        return readable
    finally:
        consumer.close()
