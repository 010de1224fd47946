"""The SDK's consumer in a cluster that other programs use: in its group, its topics and their transactions. What it
does not get, it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from notify.client import Consumer
from notify.client.kafka import loop
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.kafka import commit_offsets, open_transaction
from tests.support.kafka_consumers import is_assigned, make_topic, onlooker, produce, progress

pytest.importorskip("confluent_kafka")

from confluent_kafka import TopicPartition

from notify.client.kafka import feed
from notify.kafka.cluster import Cluster

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
            eventually(lambda: is_assigned(kafka_url, unique), "the partitions to come back")
    assert f"group {unique} continues in" in caplog.text or mode == "exclusive"


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
