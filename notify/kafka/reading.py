"""Consumers that read partitions to their ends without being a member of a group."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, Message

from notify.kafka.cluster import Cluster

FETCH_MILLISECONDS = 20
"""How long a broker waits for more records before it reports a partition's end. The default is half a second."""


def reader(cluster: Cluster, group: str, own: Mapping[str, Any] = MappingProxyType({})) -> Consumer:
    """A consumer of committed records that reports the ends of partitions.

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
