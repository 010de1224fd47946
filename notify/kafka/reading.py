"""Consumers that read partitions to their ends and are members of no group."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, Message

from notify.kafka.cluster import Cluster

FETCH_MILLISECONDS = 20
"""How long a broker may wait for further records before it says that a partition ends. The default is half a second."""


def reader(cluster: Cluster, group: str, own: Mapping[str, Any] = MappingProxyType({})) -> Consumer:
    """A consumer of committed records that is told where partitions end. Kafka wants a `group`'s name; nothing is
    committed. Raises InvalidRequest for settings that Kafka's client refuses."""
    return cluster.consumer(
        {"group.id": group, "enable.partition.eof": True, "fetch.wait.max.ms": FETCH_MILLISECONDS, **own}
    )


def arrived(consumer: Consumer, most: int, seconds: float) -> list[Message]:
    """Wait so long for a record or an end, and take what has arrived with it, so many at most.

    The client's own call for many waits until they are there, or for all of the time.
    """
    first = consumer.poll(seconds)
    return [] if first is None else [first, *consumer.consume(most - 1, 0)]
