"""A group over Kafka notes its subscriptions, where an audit finds them."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from notify.client import Consumer, Inbox
from tests.support.clock import eventually
from tests.support.groups import running

pytest.importorskip("confluent_kafka")

from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_consumer
from notify.kafka.subscriptions import MOST_PASSED, SUBSCRIPTIONS, Place, Subscribed, Subscriptions
from notify.kafka.table import KafkaTable
from tests.support.kafka_consumers import make_topic


@pytest.fixture(scope="module")
def kafka(kafka_url: str) -> Cluster:
    return Cluster.of(kafka_url)


def test_only_what_changes_is_written(kafka: Cluster, unique: str) -> None:
    first, second = Place(unique, 0), Place(unique, 1)
    assert (unique, first) not in SUBSCRIPTIONS.rows(kafka)
    shared, tagged = Subscribed("shared", 5), Subscribed("shared", 9, ("vip",))
    notes = Subscriptions(kafka, unique)
    notes.note({first: shared, second: Subscribed("ordered", 0)}, begins=True)
    again = Subscriptions(kafka, unique)
    again.note({first: Subscribed("shared", 7), second: tagged}, begins=False)
    noted = {place: s for (group, place), s in SUBSCRIPTIONS.rows(kafka).items() if group == unique}
    assert noted == {first: shared, second: tagged}
    again.note({second: Subscribed("shared", 2, ("vip",))}, begins=True)
    assert SUBSCRIPTIONS.rows(kafka)[unique, second].start == 2


def test_an_inbox_is_noted_since_its_first_note(kafka: Cluster, unique: str) -> None:
    place = Place(unique, 0)
    notes = Subscriptions(kafka, unique)
    notes.note({place: Subscribed("shared", 5)}, begins=True)
    for told, noted in ((70, 70), (80, 70), (-1, -1), (90, 90)):
        notes.note({place: Subscribed("shared", 9, inbox_from_us=told)}, begins=False)
        assert SUBSCRIPTIONS.rows(kafka)[unique, place] == Subscribed("shared", 5, inbox_from_us=noted)
    notes.note({place: Subscribed("shared", 1, inbox_from_us=95)}, begins=True)
    assert SUBSCRIPTIONS.rows(kafka)[unique, place] == Subscribed("shared", 1, inbox_from_us=90)


def test_what_other_programs_passed_over_is_noted(kafka: Cluster, unique: str) -> None:
    place, retries = Place(unique, 0), Place(f"retry.{unique}", 0)
    notes = Subscriptions(kafka, unique)

    def noted(place: Place = place) -> Subscribed:
        return SUBSCRIPTIONS.rows(kafka)[unique, place]

    def move(offset: int, place: Place = place) -> tuple[tuple[int, int], ...]:
        notes.moved({place: offset})
        notes.note({place: Subscribed("shared", offset)}, begins=False)
        return noted(place).passed

    assert move(5) == (), "the group began with that program"
    notes.note({place: Subscribed("shared", 20)}, begins=False, renews=True)
    assert move(30) == ((20, 30),) and move(40) == ((20, 40),)
    assert move(35) == ((20, 35),), "the group handles the others again"
    notes.note({place: Subscribed("shared", 50)}, begins=False, renews=True)
    assert move(60) == ((20, 35), (50, 60)) == noted().passed
    notes.note({place: Subscribed("shared", 55)}, begins=True)
    assert noted().passed == ((20, 35), (50, 55))
    for n in range(MOST_PASSED):
        notes.note({place: Subscribed("shared", 100 + 10 * n)}, begins=False, renews=True)
        many = move(101 + 10 * n)
    assert (len(many), many[0], many[-1]) == (MOST_PASSED, (20, 101), (250, 251))
    assert move(7, retries) == ((0, 7),)


@pytest.mark.long
def test_rows_of_a_topic_with_several_partitions_are_found(kafka: Cluster, kafka_url: str, unique: str) -> None:
    """As brokers or administrators make them: rows went where their keys belong, and were not read there."""
    make_topic(kafka_url, unique, 8)
    table: KafkaTable[str, int] = KafkaTable.of_json(unique, int)
    rows = {f"{n}": n for n in range(16)}
    table.put(kafka, rows, of_consumer(unique))
    assert table.rows(kafka) == rows


@pytest.mark.long
def test_a_consumer_notes_its_inbox(kafka: Cluster, kafka_url: str, unique: str, sqlite_engine: sa.Engine) -> None:
    consumer = Consumer(kafka_url, group=unique, inbox=Inbox(sqlite_engine))
    consumer.subscribe(unique, start="earliest")(lambda message, session: None)
    with running(consumer):
        eventually(lambda: (unique, Place(unique, 0)) in SUBSCRIPTIONS.rows(kafka), "the first partition to be noted")
    assert SUBSCRIPTIONS.rows(kafka)[unique, Place(unique, 0)].inbox_from_us > 0


@pytest.mark.long
def test_a_consumer_notes_what_it_takes(kafka: Cluster, kafka_url: str, unique: str) -> None:
    consumer = Consumer(kafka_url, group=unique)
    consumer.subscribe(unique, mode="ordered", start="earliest", tags=["vip"])(lambda message: None)
    with running(consumer):
        eventually(lambda: (unique, Place(unique, 3)) in SUBSCRIPTIONS.rows(kafka), "the last partition to be noted")
    noted = SUBSCRIPTIONS.rows(kafka)
    topic_id = noted[unique, Place(unique, 0)].topic_id
    expected = Subscribed("ordered", 0, ("vip",), topic_id=topic_id)
    assert topic_id and [noted[unique, Place(unique, n)] for n in range(4)] == [expected] * 4
