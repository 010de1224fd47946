"""The positions of bridges and relays in Kafka, record by record, so that an audit sees where a batch is missing.

The topics are compacted. Compaction removes the older records of a source and leaves all newer ones, so that the
remaining records are always an unbroken sequence, in which each record continues the one before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.errors import Unavailable
from notify.kafka.cluster import Cluster
from notify.spark.inputs.catalog import Bridged
from notify.spark.inputs.kafka_parts import CALL_SECONDS, Extent, Partition, reader_of

RECORDS_A_CALL = 10_000
POLL_SECONDS = 0.05


def positions_of(cluster: Cluster, places: Mapping[Partition, Extent]) -> list[Bridged]:
    """The records of these partitions, in the order of each partition. Raises Unavailable."""
    bridged: list[Bridged] = []
    for place, extent in places.items():
        for record in _records(cluster, place, extent):
            position = _position(record)
            if position is not None:
                bridged.append(position)
    return bridged


def _position(record: Any) -> Bridged | None:
    try:
        value = json.loads(record.value() or b"")
        source = (record.key() or b"").decode()
        epoch, position, since = int(value["epoch"]), str(value["position"]), str(value["since"])
    except (ValueError, KeyError, TypeError):
        return None
    return Bridged(record.offset(), record.timestamp()[1] * 1000, source, epoch, position, since, 0)


def _records(cluster: Cluster, place: Partition, extent: Extent) -> Iterator[Any]:
    """The committed records of a part of a partition."""
    if extent.high <= extent.low:
        return
    consumer = reader_of(cluster)
    try:
        consumer.assign([TopicPartition(*place, extent.low)])
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < CALL_SECONDS:
            for record in consumer.consume(RECORDS_A_CALL, POLL_SECONDS):
                error = record.error()
                if error is None and (record.offset() or 0) < extent.high:
                    quiet_since = time.monotonic()
                    yield record
                elif error is None or error.code() == KafkaError._PARTITION_EOF:
                    return
                elif not error.retriable():
                    raise KafkaException(error)
        raise Unavailable(f"Kafka gave no record of {place.topic}/{place.partition} for {CALL_SECONDS:g} s")
    finally:
        consumer.close()
