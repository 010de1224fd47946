"""`notify store sweep` over Kafka: what a record of any topic names is spared, also one that moves meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.cli.store import Sweep
from notify.client import Consumer, Message, TransactionProducer
from notify.client.tables.definitions import half_message
from notify.errors import Forbidden, InvalidRequest, NotifyError
from notify.movers.relay import relay
from notify.movers.relay.relay import Relay
from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER, Reference
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import running
from tests.support.own_server import own_server
from tests.support.stored_bodies import LARGE, BodyStore

pytest.importorskip("confluent_kafka")

from confluent_kafka import TopicPartition

from notify.kafka import rights, stored_bodies
from notify.kafka.groups import dead_letter_topic, retry_topic
from notify.kafka.rights import CLUSTER, TOPIC, Needs
from notify.kafka.stored_bodies import Extent, Place, named_in_kafka
from tests.support.kafka import committed, open_transaction, patient_sink
from tests.support.kafka_consumers import admin_of, make_topic, produce
from tests.support.secured_kafka import Grant, SecuredKafka

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def engine(sqlite_engine: sa.Engine) -> sa.Engine:
    return sqlite_engine


@pytest.fixture
def stored(tmp_path: Path) -> BodyStore:
    return BodyStore(tmp_path / "store")


def orphan(store: BodyStore, number: int, group: str = "left", mode: str = "outbox") -> str:
    name = f"{FOLDER}/{group}/{mode}/01900000-0000-7000-8000-{number:012d}"
    Store(store.url).replace(name, b"orphan")
    return name


def reference(store: BodyStore, name: str) -> str:
    return Reference(store.url, name, 6, "0" * 64).encoded().decode()


def forget_records(url: str, *topics: str) -> None:
    """Delete the records of topics of one partition, as retention does."""
    asked = [TopicPartition(topic, 0, -1) for topic in topics]
    for answer in admin_of(url).delete_records(asked).values():
        answer.result(PATIENCE_SECONDS)


def test_bodies_named_by_a_message_in_kafka_are_kept(
    kafka_url: str, engine: sa.Engine, stored: BodyStore, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting, delayed, to be tried again, dead, in a transaction that is open, and in a row that is not moved yet."""
    monkeypatch.setattr(relay, "open_sink", patient_sink)
    states = ("waiting", "delayed", "dead", "retried", "row")
    topics = {state: f"{unique}.{state}" for state in states}
    for topic in topics.values():
        make_topic(kafka_url, topic)
    consumer = Consumer(kafka_url, group=unique, store=stored.url)

    @consumer.subscribe(topics["dead"], start="earliest", max_attempts=1)
    @consumer.subscribe(topics["retried"], start="earliest", retry_min=3600, retry_max=3600)
    def on_message(message: object) -> None:
        raise ValueError("not this one")

    def send(state: str, **options: Any) -> None:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(topics[state], bytes(LARGE), **options))

    with TransactionProducer(NOWHERE, group=unique, engine=engine, mode="outbox", store=stored.url) as producer:
        for state in ("waiting", "dead", "retried"):
            send(state)
        send("delayed", delay=86_400)
        asyncio.run(Relay(engine, kafka_url).run(once=True))
        with engine.begin() as connection:  # a purge
            connection.execute(sa.delete(half_message))
        send("row")
    with running(consumer):
        committed(kafka_url, dead_letter_topic(unique), 1)
        committed(kafka_url, retry_topic(unique), 1)
    forget_records(kafka_url, topics["dead"], topics["retried"])
    in_doubt, left = orphan(stored, 1), orphan(stored, 2)
    opened = open_transaction(kafka_url, unique, topics["waiting"], "k", reference(stored, in_doubt))
    try:
        needed = stored.names() - {left}
        assert len(needed) == 6
        stored.age()
        sweep = Sweep(Store(stored.url), [unique, "left"], 3600)
        dsn = engine.url.render_as_string(hide_password=False)
        preview = sweep.run([kafka_url], [dsn], dry_run=True)
        assert (preview["objects"], preview["named"], preview["names"]) == (7, 6, [left])
        done = sweep.run([kafka_url], [dsn])
        assert (done["swept"], done["named"]) == (1, 6) and stored.names() == needed
    finally:
        opened.abort_transaction(PATIENCE_SECONDS)


def test_a_message_that_moves_while_it_is_looked_for_is_found(
    kafka_url: str, stored: BodyStore, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to where the search has been, or to a topic that was not there, and Kafka deletes what it leaves."""
    names = [orphan(stored, number) for number in range(3)]
    slots = [f"{unique}.slot-{number}" for number in range(3)]
    for slot, name in zip(slots, names, strict=True):
        make_topic(kafka_url, slot)
        produce(kafka_url, slot, [reference(stored, name)])
    make_topic(kafka_url, f"{unique}.topic")
    passes: list[int] = []
    original = stored_bodies.read

    def moved_first(consumer: Any, cluster: Any, unread: Mapping[Place, Extent]) -> Iterator[set[str]]:
        passes.append(len(unread))
        if len(passes) == 1:
            make_topic(kafka_url, f"{unique}.made-meanwhile")
            for name, target in zip(names, (f"{unique}.topic", f"{unique}.made-meanwhile"), strict=False):
                produce(kafka_url, target, [reference(stored, name)])
            forget_records(kafka_url, *slots[:2])
        return original(consumer, cluster, unread)

    monkeypatch.setattr(stored_bodies, "read", moved_first)
    assert set().union(*named_in_kafka(kafka_url)) >= set(names)
    assert len(passes) >= 2


def test_without_the_servers_of_half_messages_nothing_is_deleted(kafka_url: str, stored: BodyStore) -> None:
    orphan(stored, 1, mode="half")
    stored.age()
    with pytest.raises(InvalidRequest, match="undecided messages at servers"):
        Sweep(Store(stored.url), ["left"], 3600, gone=True).run([kafka_url])
    assert len(stored.names()) == 1


def test_if_kafka_is_away_nothing_is_deleted(engine: sa.Engine, stored: BodyStore) -> None:
    orphan(stored, 1)
    stored.age()
    dsn = engine.url.render_as_string(hide_password=False)
    with pytest.raises(NotifyError, match=r"127\.0\.0\.1:9"):
        Sweep(Store(stored.url), ["left"], 3600, gone=True).run(["kafka://127.0.0.1:9"], [dsn])
    assert len(stored.names()) == 1


@pytest.mark.long
def test_a_sweep_that_may_not_see_every_topic_is_refused(stored: BodyStore, unique: str) -> None:
    """Brokers leave out of their lists what a user may not see: its bodies would be deleted."""
    with own_server("secured", SecuredKafka) as secured:
        plain = secured.cluster.url
        make_topic(plain, unique)
        name = orphan(stored, 1)
        produce(plain, unique, [reference(stored, name)])
        assert name in set().union(*named_in_kafka(secured.url(secured.user(rights.of_sweep()))))
        without_cluster = Needs("sweep", tuple(need for need in rights.of_sweep().needs if need.kind != CLUSTER))
        with pytest.raises(Forbidden, match="Describe on the cluster"):
            list(named_in_kafka(secured.url(secured.user(without_cluster))))
        user = secured.user(Needs("sweep", tuple(n for n in rights.of_sweep().needs if n.kind != TOPIC)))
        secured.grant(user, [Grant(TOPIC, f"{unique}*", ("READ",))])
        with pytest.raises(Forbidden, match=r"grant it Read on every topic"):
            list(named_in_kafka(secured.url(user)))
        # A client without a name in its settings, as with a certificate: any denial may be one of it.
        secured.grant("*", [Grant(TOPIC, "*", ("READ",))])
        assert name in set().union(*named_in_kafka(plain))
        secured.deny("somebody", unique)
        with pytest.raises(Forbidden, match=f"take away what denies it {unique}"):
            list(named_in_kafka(plain))
