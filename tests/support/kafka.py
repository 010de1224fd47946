"""Reading and writing Kafka's topics as any client of Kafka would."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.errors import Unavailable
from notify.kafka.records import SCHEME
from notify.movers.sinks.sink import Sink, open_sink
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.kafka_proxy import KafkaProxy
from tools.kafka_cluster import KafkaCluster, NodeSettings

MANY_TOPICS = {"file.delete.delay.ms": 1_000, "log.index.size.max.bytes": 64 << 10}
"""Settings for tests that make and delete thousands of partitions: each maps its indexes, of 10 MB by default, and
stays for a minute after it was deleted."""


@dataclass(frozen=True, slots=True)
class KafkaNode:
    """A Kafka node that clients reach through a proxy."""

    url: str
    proxy: KafkaProxy
    cluster: KafkaCluster

    @classmethod
    def start(cls, directory: Path) -> KafkaNode:
        """Raises Unavailable where Kafka cannot run here. A node that does not become ready is an error, since a test
        without it would be skipped, and nobody would notice."""
        proxies: list[KafkaProxy] = []

        def advertised(port: int) -> int:
            proxies.append(KafkaProxy("127.0.0.1", port))
            return proxies[-1].port

        cluster = KafkaCluster(directory, advertised=advertised, node_settings=NodeSettings(MANY_TOPICS))
        try:
            cluster.start(5 * PATIENCE_SECONDS)
        except Unavailable as reason:
            raise TimeoutError(str(reason)) from None
        return cls(cluster.url, proxies[0], cluster)

    def stop(self) -> None:
        self.proxy.close()
        self.cluster.kill_node(0)  # an orderly end of thousands of partitions takes ten seconds


def patient_sink(url: str) -> Sink:
    """A sink whose brokers may take as long for a call as a test waits for an event."""
    if not url.startswith(SCHEME):
        return open_sink(url)
    from notify.movers.sinks.kafka import KafkaSink

    return KafkaSink(url, PATIENCE_SECONDS)


def commit_offsets(consumer: Any, *offsets: Any) -> None:
    """Commit a group's offsets. A node that has just started may still load what its coordinator knows."""
    from confluent_kafka import KafkaError, KafkaException

    no_coordinator = (
        KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    )  # fmt: skip

    def is_committed() -> bool:
        try:
            consumer.commit(offsets=list(offsets), asynchronous=False)
        except KafkaException as raised:
            if raised.args[0].code() not in no_coordinator:
                raise
            return False
        return True

    eventually(is_committed, "the group's coordinator")


class Wrapped:
    """A client of Kafka, of which a subclass changes some calls."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def committed(url: str, topic: str, wanted: int = 0, *, uncommitted: bool = False) -> list[Any]:
    """All committed records of a topic, partition by partition; with `uncommitted` the others, too.

    Fails if fewer come than `wanted`.
    """
    from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

    from notify.kafka.cluster import Cluster

    isolation = "read_uncommitted" if uncommitted else "read_committed"
    consumer = Cluster.of(url).consumer(
        # A broker waits so long at the end of a partition; by default half a second each time.
        {"group.id": "a-test", "enable.partition.eof": True, "isolation.level": isolation, "fetch.wait.max.ms": 20}
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        partitions: Mapping[int, Any] = {}
        while not partitions:  # nobody has made the topic yet
            assert time.monotonic() < deadline, f"there is no topic {topic}"
            partitions = consumer.list_topics(topic, timeout=PATIENCE_SECONDS).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        records: dict[int, list[Any]] = {number: [] for number in partitions}
        ended: set[int] = set()
        while len(ended) < len(partitions) or sum(map(len, records.values())) < wanted:
            assert time.monotonic() < deadline, f"{sum(map(len, records.values()))} of {wanted} records of {topic}"
            record = consumer.poll(0.5)
            if record is None:
                continue
            if record.error() is None:
                records[record.partition()].append(record)
                ended.discard(record.partition())
            elif record.error().code() == KafkaError._PARTITION_EOF:
                ended.add(record.partition())
        return [record for number in sorted(records) for record in records[number]]
    finally:
        consumer.close()


def open_transaction(url: str, transactional_id: str, topic: str, key: str, value: str, partition: int = -1) -> Any:
    """A producer with an open transaction that has written one record; `partition` -1: where its key belongs."""
    from notify.kafka.cluster import Cluster

    producer = Cluster.of(url).producer({"transactional.id": transactional_id})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, value.encode(), key.encode(), partition)
    producer.flush(PATIENCE_SECONDS)
    return producer
