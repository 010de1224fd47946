"""Topics that are deleted and recreated, with fewer records or with as many: none is taken for the former one."""

from __future__ import annotations

from typing import Any

import pytest

from notify.client import Consumer
from tests.support.clock import eventually
from tests.support.groups import running

pytest.importorskip("confluent_kafka")

from notify.client.kafka import loop
from notify.kafka.cluster import Cluster
from notify.kafka.subscriptions import SUBSCRIPTIONS, Place
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics
from tests.support.kafka_consumers import CALL_SECONDS, admin_of, make_topic, produce

pytestmark = pytest.mark.filterwarnings("error")

NEW = ["a", "b", "c", "d", "e", "f", "g"]


def consumer_of(url: str, name: str, seen: list[str], **options: Any) -> Consumer:
    """A consumer of the topic and group of this name, that notes each text."""
    consumer = Consumer(url, group=name)
    consumer.subscribe(name, **options)(lambda message: seen.append(message.text))
    return consumer


def make_anew(url: str, topic: str, texts: list[str]) -> None:
    admin = admin_of(url)
    admin.delete_topics([topic])[topic].result(CALL_SECONDS)
    eventually(lambda: topic not in admin.list_topics().topics, "the topic to go")
    make_topic(url, topic)
    produce(url, topic, texts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("shared", 3),
        pytest.param("shared", 5, marks=pytest.mark.long),
        pytest.param("exclusive", 7, marks=pytest.mark.long),
    ],
)
def test_a_consumer_reads_it_from_its_first_record(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, mode: str, count: int
) -> None:
    """Where there were as many records as before, it continued at its old offset, and passed what lay before."""
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    make_topic(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, mode=mode, start="earliest")):
        produce(kafka_url, unique, [f"old {n}" for n in range(5)])
        eventually(lambda: len(seen) == 5, "the first messages")
        make_anew(kafka_url, unique, NEW[:count])
        # It may have begun at the old offset, before it saw that.
        eventually(lambda: set(seen[5:]) == set(NEW[:count]), "the new messages")


@pytest.mark.long
def test_a_consumer_that_was_away_reads_it_from_its_first_record(kafka_url: str, unique: str) -> None:
    """Its note of where it was in the former topic counted, as for a group whose offsets Kafka has forgotten."""
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"old {n}" for n in range(5)])
    with running(consumer_of(kafka_url, unique, [])):  # from the latest on
        noted = (unique, Place(unique, 0))
        eventually(lambda: noted in SUBSCRIPTIONS.rows(Cluster.of(kafka_url)), "the note")
    make_anew(kafka_url, unique, NEW)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: seen, "a message")
        eventually(lambda: seen == NEW, "all of them")
    assert SUBSCRIPTIONS.rows(Cluster.of(kafka_url))[noted].start == 0, "an audit expects them, too"


def test_a_server_reads_one_of_its_own_from_its_first_record(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["old 1", "old 2"])
    forgotten: list[str] = []
    topics = CompactedTopics(Brokers(Cluster.of(kafka_url)), forgotten.append)

    def news() -> list[bytes | None]:
        return [record.value for record in topics.news([unique])]

    assert news() == [b"old 1", b"old 2"]
    make_anew(kafka_url, unique, ["a", "b"])
    taken: list[bytes | None] = []
    eventually(lambda: taken.extend(news()) or len(taken) == 2, "the new records")
    topics.close()
    assert (taken, forgotten) == ([b"a", b"b"], [unique])
