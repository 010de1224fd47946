"""Delayed messages in Kafka: none twice, none early, none lost, whoever releases them and whatever happens to it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from notify import ids
from notify.demo.kafka import KafkaCluster
from notify.errors import Unavailable
from notify.kafka.cluster import Cluster
from notify.kafka.records import brokers_of
from notify.sinks.delays.releaser import Releaser
from notify.sinks.sink import open_sink
from notify.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaCluster]:
    directory = Path(tempfile.mkdtemp(prefix="notify-kafka-"))
    try:
        try:
            cluster = KafkaCluster(directory).start()
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def releasing(url: str) -> Iterator[Releaser]:
    release = Releaser(Cluster.of(url))
    thread = threading.Thread(target=release.run, daemon=True)
    thread.start()
    try:
        yield release
    finally:
        release.stop()
        thread.join(PATIENCE_SECONDS)


def send(url: str, topic: str, bodies: list[str], delay: float) -> None:
    async def run() -> None:
        sink = open_sink(url)
        epoch, position = await sink.claim(topic)
        message = [
            BridgedTransaction(
                ids.to_text(ids.new_id()), "g", [PackedMessage(topic=topic, body=b.encode(), key=b[-1], delay=delay)]
            )
            for b in bodies
        ]
        batch = PackedBridgeBatch(epoch=epoch, expected_position=position, position=bodies[-1], transactions=message)
        await sink.append(topic, batch)
        await sink.close()

    asyncio.run(run())


def bodies_of(url: str, topic: str, wanted: int) -> list[str]:
    """All committed records of a topic. Fails if fewer come than `wanted`."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": brokers_of(url), "group.id": f"reader-{uuid.uuid4().hex}",
            "auto.offset.reset": "earliest", "isolation.level": "read_committed", "enable.partition.eof": True,
        }
    )  # fmt: skip
    consumer.subscribe([topic])
    came: list[str] = []
    ended: set[int] = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(ended) < 4 or len(came) < wanted:
        assert time.monotonic() < deadline, f"{len(came)} of {wanted}"
        record: Any = consumer.poll(0.5)
        if record is None:
            continue
        if record.error() is None:
            came.append(record.value().decode())
            ended.discard(record.partition())
        elif record.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
            ended.add(record.partition())
    consumer.close()
    return came


def test_a_restarted_release_releases_none_again(kafka: KafkaCluster, unique: str) -> None:
    """It began to release before it had read that messages were released: all of 3,000 came twice."""
    names = [f"{n:04}" for n in range(3000)]
    send(kafka.url, unique, names, delay=0.5)
    with releasing(kafka.url) as release:
        eventually(lambda: release.total.released >= 3000, "the release of all")
    send(kafka.url, unique, ["last"], delay=0.5)
    with releasing(kafka.url) as again:
        eventually(lambda: "last" in bodies_of(kafka.url, unique, 1), "the last")
        came = Counter(bodies_of(kafka.url, unique, 3001))
    assert came == Counter([*names, "last"]), f"{sum(n - 1 for n in came.values())} came again ({again.total.released})"
