"""Kafka forgets the offsets of a group that rests (offsets.retention.minutes): the group loses nothing by it."""

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
from tests.support.kafka_consumers import CALL_SECONDS, admin_of, make_topic, produce, progress

pytestmark = pytest.mark.filterwarnings("error")


def forget(url: str, group: str) -> None:
    """As the brokers do when a group has rested for too long."""
    admin_of(url).delete_consumer_groups([group])[group].result(CALL_SECONDS)


def consumer_of(url: str, group: str, seen: list[str], topic: str = "", **options: Any) -> Consumer:
    consumer = Consumer(url, group=group)
    consumer.subscribe(topic or group, **options)(lambda message: seen.append(message.text))
    return consumer


def until_noted(url: str, group: str) -> None:
    """Wait until a group has committed where it begins, and noted that: an offset that is forgotten before is lost."""
    place = Place(group, 0)
    eventually(lambda: (group, place) in SUBSCRIPTIONS.rows(Cluster.of(url)), "the note")
    assert (group, 0) in progress(url, group)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", pytest.param("failover", marks=pytest.mark.long)])
def test_a_group_that_rested_goes_on_where_it_was_noted(
    kafka_url: str, unique: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began at the end, and everything that came while it rested was lost."""
    make_topic(kafka_url, unique)
    monkeypatch.setattr(loop, "RENEW_SECONDS", 0.2)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, mode=mode, start="earliest")):
        produce(kafka_url, unique, ["a", "b"])
        place = Place(unique, 0)
        eventually(
            lambda: (note := SUBSCRIPTIONS.rows(Cluster.of(kafka_url)).get((unique, place))) and note.at == 2,
            "the note",
        )
    forget(kafka_url, unique)
    produce(kafka_url, unique, ["c"])
    again: list[str] = []
    with running(consumer_of(kafka_url, unique, again, mode=mode)):
        eventually(lambda: again, "what came while the group rested")
    assert (sorted(seen), again) == (["a", "b"], ["c"])


@pytest.mark.long
def test_without_a_later_note_it_begins_where_it_began(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a"])
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):  # it begins at the end
        until_noted(kafka_url, unique)
    forget(kafka_url, unique)
    produce(kafka_url, unique, ["b"])
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: seen, "what came while the group rested")
    assert seen == ["b"]


@pytest.mark.long
def test_a_topic_that_was_made_anew_is_read_from_its_first_record(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a", "b"])
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        until_noted(kafka_url, unique)
    forget(kafka_url, unique)
    admin_of(kafka_url).delete_topics([unique])[unique].result(CALL_SECONDS)
    eventually(lambda: unique not in admin_of(kafka_url).list_topics(timeout=CALL_SECONDS).topics, "the topic to go")
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["c"])
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: seen, "the new topic's first record")
    assert seen == ["c"]


@pytest.mark.long
def test_an_owner_commits_where_nothing_happens(kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Kafka group never has a member, so that Kafka forgot the offset of each quiet partition."""
    make_topic(kafka_url, unique)
    monkeypatch.setattr(loop, "RENEW_SECONDS", 0.2)
    with running(consumer_of(kafka_url, unique, [], mode="exclusive")):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's first offset")
        forget(kafka_url, unique)
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the offset again")


@pytest.mark.long
def test_a_pattern_does_not_stand_for_the_groups_retries(kafka_url: str, unique: str) -> None:
    """The retry topic began at the end, as the pattern's topics do: what waited there was lost."""
    make_topic(kafka_url, unique)
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(f"*{unique}", start="latest", retry_min=5, retry_max=5)
    def fail(message: Any) -> None:
        raise ValueError("not now")

    with running(consumer):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's first offset")
        produce(kafka_url, unique, ["a"])
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 1, "the message to wait in the retry topic")
    forget(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, topic=f"*{unique}")):
        eventually(lambda: seen, "the message again")
    # It is in two topics: where the group was noted to begin, and where its retry waits.
    assert set(seen) == {"a"}
