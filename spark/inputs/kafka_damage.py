"""Batches of records that fail their checksum: where a batch ends, and which of its records can still be read."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from notify.errors import Unavailable
from notify.kafka.cluster import Cluster
from notify.spark.inputs.kafka_parts import CALL_SECONDS, Part, reader_of

QUIET_SECONDS = 5.0
"""After this time without a record, nothing more of a damaged batch can be read."""


def good_from(cluster: Cluster, part: Part, first: int) -> int:
    """The first offset behind the damaged batch that begins at `first`; at most the end of the part.

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
