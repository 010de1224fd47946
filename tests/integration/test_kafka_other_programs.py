"""The SDK's consumer in a cluster that other programs use: in its group, its topics and their transactions. What it
does not get, it says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from notify.client import Consumer
from notify.client.kafka import loop
from notify.errors import Unavailable
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.kafka import KafkaNode, commit_offsets, committed, open_transaction
from tests.support.kafka_consumers import admin_of, make_topic, onlooker, produce, progress

pytest.importorskip("confluent_kafka")

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]

from notify.client.kafka import feed
from notify.kafka import cluster, transactional
from notify.kafka.cluster import Cluster
from notify.kafka.quotas import Quotas
from notify.kafka.topics import Topics
from notify.movers.sinks.kafka import KafkaSink
from notify.movers.sinks.sink import pace_of

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    monkeypatch.setattr(loop, "OTHERS_SECONDS", 0.5)


def consumer_of(url: str, name: str, seen: list[str], **options: Any) -> Consumer:
    """A consumer of the topic and group of this name, that notes each text."""
    consumer = Consumer(url, group=name)
    consumer.subscribe(name, start="earliest", **options)(lambda message: seen.append(message.text))
    return consumer


@contextmanager
def other_program(url: str, group: str) -> Iterator[Any]:
    """A plain consumer of Kafka that has joined a group, as a console or a sink of another team does."""
    settings = {"group.id": group, "partition.assignment.strategy": "cooperative-sticky", "enable.auto.commit": True}
    consumer = Cluster.of(url).consumer({**settings, "auto.commit.interval.ms": 100, "auto.offset.reset": "earliest"})
    consumer.subscribe([group])
    try:
        yield consumer
    finally:
        consumer.close()


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_a_program_that_takes_part_in_the_group_is_told(
    kafka_url: str, unique: str, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Kafka gave it partitions, and their messages never reached a handler: nobody was told."""
    make_topic(kafka_url, unique, 4)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, mode=mode)):
        produce(kafka_url, unique, [f"{n}" for n in range(10)])
        eventually(lambda: len(seen) == 10, "the first messages")
        with other_program(kafka_url, unique) as other:

            def is_told() -> bool:
                produce(kafka_url, unique, ["more"])
                other.poll(0.1)
                return f"another program commits offsets of group {unique}" in caplog.text

            eventually(is_told, "a line about the other program")
        if mode == "shared":
            eventually(lambda: f"group {unique} continues in" in caplog.text, "the partitions to come back")


def test_offsets_that_another_program_has_moved_are_told_once(
    kafka_url: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As with kafka-consumer-groups.sh --reset-offsets: a typo in it was followed without a word."""
    make_topic(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        produce(kafka_url, unique, ["a"])
        eventually(lambda: seen == ["a"], "the first message")
    produce(kafka_url, unique, ["b", "c"])
    commit_offsets(onlooker(kafka_url, unique), TopicPartition(unique, 0, 3))
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: progress(kafka_url, unique)[unique, 0].is_own, "the offset to be Notify's again")
    assert f"group {unique} continues in 1 partitions of topic {unique}, such as 0 at 3, where another" in caplog.text
    caplog.clear()
    with running(consumer_of(kafka_url, unique, seen)):
        produce(kafka_url, unique, ["d"])
        eventually(lambda: seen == ["a", "d"], "the next message")
    assert "another program" not in caplog.text


def test_records_that_an_open_transaction_hides_are_told(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client takes such a partition for read to its end, and the group stood still without a word."""
    monkeypatch.setattr(feed, "HIDDEN_SECONDS", 0.5)
    make_topic(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        produce(kafka_url, unique, ["a"])
        eventually(lambda: seen == ["a"], "the first message")
        hiding = open_transaction(kafka_url, f"other-{unique}", unique, "k", "never")
        produce(kafka_url, unique, ["b"])
        eventually(lambda: f"topic {unique} gives nothing from offset 1 on in partition 0" in caplog.text, "a line")
        hiding.abort_transaction(PATIENCE_SECONDS)
        eventually(lambda: seen == ["a", "b"], "the hidden message")


def test_a_topic_that_is_compacted_from_now_on_is_told(
    kafka_url: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bridge looked at a topic's policy once, and an operator may change it at any time."""
    topics = Topics(Cluster.of(kafka_url))
    topics.largest(unique)

    def set_policy(policy: str) -> None:
        entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
        wanted = ConfigResource(ConfigResource.Type.TOPIC, unique, incremental_configs=[entry])
        admin_of(kafka_url).incremental_alter_configs([wanted])[wanted].result(PATIENCE_SECONDS)

    def tells() -> bool:
        topics.largest(unique, refresh=True)
        return caplog.text.count(f"Kafka compacts topic '{unique}'") == 1

    assert not tells()
    set_policy("compact")
    eventually(tells, "a line about the policy")
    assert tells(), "told once"


def limit(node: KafkaNode, client_id: str, quota: str) -> None:
    node.cluster.run_tool(
        "kafka.admin.ConfigCommand",
        "--alter",
        "--add-config",
        quota,
        "--entity-type",
        "clients",
        "--entity-name",
        client_id,
    )


def batch_of(topic: str, epoch: int, position: str, bodies: list[bytes]) -> PackedBridgeBatch:
    """A batch of transactions with a message each."""
    sent = [
        BridgedTransaction(
            id=ids.to_text(ids.new_id()), producer_group="g", messages=[PackedMessage(topic=topic, body=body)]
        )
        for body in bodies
    ]
    return PackedBridgeBatch(epoch=epoch, expected_position="", position=position, transactions=sent)


@pytest.mark.parametrize("throttled_seconds", [45.0, 8.0], ids=["in one batch", "in smaller batches"])
def test_a_backlog_passes_at_the_pace_of_a_quota(kafka_node: KafkaNode, unique: str, throttled_seconds: float) -> None:
    """A batch that a quota did not let through in time never passed: each attempt made the debt larger."""
    limit(kafka_node, unique, "producer_byte_rate=100000")
    bodies = [n.to_bytes(4) + os.urandom(200_000) for n in range(13)]

    async def publish() -> int:
        """Move all bodies, as a bridge does; how many batches had no answer in time."""
        sink = KafkaSink(f"{kafka_node.url}?client.id={unique}", 2.0, throttled_seconds)
        failures = 0
        try:
            while True:
                try:
                    epoch, position = await sink.claim(unique)
                    while (moved := int(position or 0)) < len(bodies):
                        count = max(1, pace_of(sink, 8 << 20)() // len(bodies[0]))
                        position = str(min(moved + count, len(bodies)))
                        await sink.append(unique, batch_of(unique, epoch, position, bodies[moved : int(position)]))
                    return failures
                except Unavailable as error:
                    failures += "have no answer" in str(error)
        finally:
            await sink.close()

    make_topic(kafka_node.url, unique)
    failures = asyncio.run(asyncio.wait_for(publish(), 2 * PATIENCE_SECONDS))
    assert (failures == 0) == (throttled_seconds == 45.0)
    assert [record.value() for record in committed(kafka_node.url, unique, len(bodies))] == bodies


def test_a_quota_that_keeps_brokers_silent_is_told(
    kafka_node: KafkaNode, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bridge said for hours that records have no answer, a consumer said nothing."""
    told = Quotas()
    monkeypatch.setattr(transactional, "QUOTAS", told)
    monkeypatch.setattr(cluster, "QUOTAS", told)
    limit(kafka_node, unique, "producer_byte_rate=1000,consumer_byte_rate=1000")

    async def publish() -> str:
        """Publish until a reason names the quota."""
        sink = KafkaSink(f"{kafka_node.url}?client.id={unique}", 5.0, 5.0)
        try:
            while True:
                try:
                    epoch, _ = await sink.claim(unique)
                    await sink.append(unique, batch_of(unique, epoch, "1", [os.urandom(300_000)]))
                except Unavailable as error:
                    if "because of its quota" in str(error):
                        return str(error)
        finally:
            await sink.close()

    assert "raise producer_byte_rate" in asyncio.run(asyncio.wait_for(publish(), 2 * PATIENCE_SECONDS))
    assert "because it uses more than its quota" in caplog.text
    caplog.clear()
    monkeypatch.setattr(cluster, "QUOTAS", Quotas())
    make_topic(kafka_node.url, f"{unique}-2")
    produce(kafka_node.url, f"{unique}-2", ["a" * 100_000] * 3)
    consumer = Consumer(kafka_node.url, group=unique, instance=unique)
    consumer.subscribe(f"{unique}-2", start="earliest")(lambda message: None)
    with running(consumer):
        eventually(lambda: "because it uses more than its quota" in caplog.text, "a line about the quota")
