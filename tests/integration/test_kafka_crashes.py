"""The crash explorer kills a service over Kafka at each step of its relay and of its consumer."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables
from notify.protocol.message import ReceivedMessage
from notify.testing import Exploration, Process, explore
from tests.support.clock import PATIENCE_SECONDS

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

    rows = {"causes": "SELECT item FROM orders", "effects": "SELECT item FROM points"}
    return explore(shop, kafka=kafka_url, seconds=2 * PATIENCE_SECONDS, **(rows | options))


@pytest.mark.parametrize("real", [False, True])
def test_each_step_over_kafka_is_tried(kafka_url: str, unique: str, real: bool) -> None:
    seen = explored(kafka_url, unique, has_inbox=True, real=real)
    assert seen.findings == () and seen.missed == (), seen
    whats = {step.what for step in seen.steps}
    assert {
        f"before the relay sends {unique}", f"after the relay has sent {unique}", "before COMMIT", "after COMMIT",
        f"before the handler of {unique}", "before the commit of offsets", "after the commit of offsets",
    } <= whats  # fmt: skip


def test_an_effect_without_an_inbox_happens_twice(kafka_url: str, unique: str) -> None:
    seen = explored(kafka_url, unique, has_inbox=False)
    assert {finding.name for finding in seen.findings} == {"DUP_EFFECT"}, seen
    whats = {finding.fault.step.what for finding in seen.findings if finding.fault is not None}
    assert {"after COMMIT", "before the commit of offsets"} <= whats, seen
