"""The crash explorer kills a service over Kafka at each step of its relay and of its consumer."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.client import (
    AsyncConsumer,
    Consumer,
    Inbox,
    Message,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.errors import InvalidRequest
from notify.protocol.message import ReceivedMessage
from notify.testing import Exploration, Process, explore
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running

pytest.importorskip("confluent_kafka")
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("item", sa.String(50)))
points = sa.Table("points", metadata, sa.Column("item", sa.String(50)))


def explored(kafka_url: str, name: str, *, has_inbox: bool, **options: Any) -> Exploration:
    """A shop whose topic and group have this name. Without an inbox its handler books in a session of its own."""

    def place(engine: sa.Engine, producer: TransactionProducer) -> None:
        with Session(engine) as session, session.begin():
            session.execute(orders.insert().values(item="book"))
            producer.send(session, Message(name, "book"))

    def shop(process: Process) -> None:
        engine = process.engine
        metadata.create_all(engine)
        create_tables(engine)
        producer = TransactionProducer(process.url, group=name, engine=engine, mode="outbox")
        consumer = Consumer(process.kafka, group=name, inbox=Inbox(engine) if has_inbox else None)

        def book(session: Session, message: ReceivedMessage) -> None:
            session.execute(points.insert().values(item=message.text))

        if has_inbox:

            @consumer.subscribe(name, start="earliest")
            def once(message: ReceivedMessage, session: Session) -> None:
                book(session, message)

        else:

            @consumer.subscribe(name, start="earliest")
            def again(message: ReceivedMessage) -> None:
                with Session(engine) as session, session.begin():
                    book(session, message)

        process.run(producer, consumer)
        process.relay()
        process.act(place, engine, producer)

    return explore(shop, kafka=kafka_url, seconds=10 * PATIENCE_SECONDS, **(ROWS | options))


ROWS: dict[str, Any] = {"causes": "SELECT item FROM orders", "effects": "SELECT item FROM points"}


def careful(seen: Exploration, topic: str) -> None:
    """No finding, after all that a message goes through. On a slow machine a step may happen twice in one run only."""
    assert seen.findings == (), seen
    assert [fault for fault in seen.missed if fault.step.number == 1] == [], seen
    whats = {step.what for step in seen.steps}
    assert {
        f"before the relay sends {topic}", f"after the relay has sent {topic}", "before COMMIT", "after COMMIT",
        f"before the handler of {topic}", "before the commit of offsets", "after the commit of offsets",
    } <= whats  # fmt: skip


@pytest.mark.parametrize("real", [False, True])
def test_each_step_over_kafka_is_tried(kafka_url: str, unique: str, real: bool) -> None:
    careful(explored(kafka_url, unique, has_inbox=True, real=real), unique)


def ordering(process: Process, *topics: str) -> None:
    """A process's relay, and an order with a message for each topic."""
    producer = TransactionProducer(process.url, group=topics[0], engine=process.engine, mode="outbox")
    process.relay()

    def place() -> None:
        with Session(process.engine) as session, session.begin():
            session.execute(orders.insert().values(item="book"))
            for topic in topics:
                producer.send(session, Message(topic, "book"))

    process.act(place)


def test_each_step_of_coroutines_is_tried(kafka_url: str, unique: str) -> None:
    def shop(process: Process) -> None:
        metadata.create_all(process.engine)
        create_tables(process.engine)
        engine = create_async_engine(process.database.replace("sqlite:", "sqlite+aiosqlite:"))
        use_explicit_begin(engine)
        consumer = AsyncConsumer(process.kafka, group=unique, inbox=Inbox(engine))

        @consumer.subscribe(unique, start="earliest")
        async def book(message: ReceivedMessage, session: AsyncSession) -> None:
            await session.execute(points.insert().values(item=message.text))

        process.run(consumer)
        ordering(process, unique)

    seen = explore(shop, kafka=kafka_url, seconds=10 * PATIENCE_SECONDS, **ROWS)
    careful(seen, unique)
    assert any("session.execute(points" in step.code for step in seen.steps), seen.steps


def test_a_group_waits_for_its_own_topics_only(kafka_url: str, unique: str) -> None:
    """Each group was waited for in the topics of all: a run without a fault was UNDELIVERED after its seconds."""
    topics = [f"{unique}.{name}" for name in ("first", "second")]

    def shop(process: Process) -> None:
        metadata.create_all(process.engine)
        create_tables(process.engine)
        consumers = [Consumer(process.kafka, group=topic, inbox=Inbox(process.engine)) for topic in topics]

        @consumers[0].subscribe(f"{unique}.f*", start="earliest")
        def book(message: ReceivedMessage, session: Session) -> None:
            session.execute(points.insert().values(item=message.text))

        @consumers[1].subscribe(topics[1], start="earliest")
        def look(message: ReceivedMessage, session: Session) -> None:
            session.execute(sa.select(points.c.item))

        process.run(*consumers)
        ordering(process, *topics)

    seen = explore(shop, kafka=kafka_url, seconds=10 * PATIENCE_SECONDS, **ROWS)
    assert seen.findings == (), seen


def test_a_run_gets_nothing_that_the_one_before_has_left(kafka_url: str, unique: str) -> None:
    """A message that fails again and again made effects in the runs that followed: GHOST."""
    from notify.kafka.cluster import Cluster
    from notify.testing.explored_kafka import ExploredKafka, group_of

    consumer = Consumer(kafka_url, group=unique)
    is_handled = threading.Event()

    @consumer.subscribe(unique, start="earliest", retry_min=60)
    def fail(message: ReceivedMessage) -> None:
        is_handled.set()
        raise ValueError("always")

    group = group_of(consumer)
    brokers = ExploredKafka(kafka_url)
    sender = Cluster.of(kafka_url).producer({})
    brokers.begin([group], [unique])
    with running(consumer):
        eventually(lambda: unique in brokers._topics(), "the topic of the consumer")
        for _ in range(3):
            sender.produce(unique, b"book")
        sender.flush(PATIENCE_SECONDS)
        assert is_handled.wait(PATIENCE_SECONDS)
        eventually(lambda: brokers.unsettled([group]) >= 1, "what waits for another attempt")
        eventually(lambda: any(p.offset > 0 for p in brokers._positions(group)), "the group's position")
    real = ExploredKafka(kafka_url)
    with pytest.raises(InvalidRequest, match=f"messages wait in Kafka for group {unique}"):
        real.begin([group], [unique])
    assert brokers.unsettled([group]) >= 1
    real.close()
    brokers.begin([group], [unique])
    assert brokers.unsettled([group]) == 0
    brokers.close()


def test_a_topic_that_was_just_made_is_asked_for_its_ends(kafka_url: str, unique: str) -> None:
    """Its partitions have no leader for a moment: the run ended with NOT_LEADER_FOR_PARTITION."""
    from confluent_kafka.admin import NewTopic

    from notify.kafka.cluster import Cluster
    from notify.testing.explored_kafka import ExploredKafka

    with closing(ExploredKafka(kafka_url)) as brokers:
        admin = Cluster.of(kafka_url).admin()
        admin.create_topics([NewTopic(unique, 16, 1)])[unique].result()
        assert [brokers._ends((unique, number)) for number in range(16)] == [(0, 0)] * 16


def test_explore_refuses_what_it_cannot_do_over_kafka(kafka_url: str, unique: str) -> None:
    def delaying(process: Process) -> None:
        metadata.create_all(process.engine)
        create_tables(process.engine)
        producer = TransactionProducer(process.url, group=unique, engine=process.engine, mode="outbox")
        process.relay()

        def place() -> None:
            with Session(process.engine) as session, session.begin():
                producer.send(session, Message(unique, "book", delay=30))

        process.act(place)

    with pytest.raises(InvalidRequest, match="over Kafka a delay passes in real time"):
        explore(delaying, kafka=kafka_url)

    def broadcasting(process: Process) -> None:
        consumer = Consumer(process.kafka, group=unique)
        consumer.subscribe(unique, mode="broadcast")(lambda message: None)
        process.run(consumer)

    with pytest.raises(InvalidRequest, match="has a broadcast topic: give the consumer an instance="):
        explore(broadcasting, kafka=kafka_url)


def test_an_effect_without_an_inbox_happens_twice(kafka_url: str, unique: str) -> None:
    seen = explored(kafka_url, unique, has_inbox=False)
    assert {finding.name for finding in seen.findings} == {"DUP_EFFECT"}, seen
    whats = {finding.fault.step.what for finding in seen.findings if finding.fault is not None}
    assert {"after COMMIT", "before the commit of offsets"} <= whats, seen
