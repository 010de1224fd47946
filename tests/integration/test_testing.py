"""notify.testing as a service's own tests use it: messages seen, time moved, outcomes lost, the service crashed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check import CheckMessageListener, HalfMessage, Outcome
from notify.client import AsyncTransactionProducer, Consumer, Inbox, Message, TransactionProducer, create_tables
from notify.errors import DeadLetter, InvalidRequest, TransactionRefused
from notify.message import ReceivedMessage
from notify.testing import Crashed, InMemoryServer, crashing
from tests.support.shop import make_engine

metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("item", sa.Text))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = make_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(made)
    metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def producer(notify_server: InMemoryServer, engine: sa.Engine) -> Iterator[TransactionProducer]:
    with TransactionProducer(notify_server.url, group="orders", engine=engine, check_after=0.5) as made:
        yield made


def place_order(engine: sa.Engine, producer: TransactionProducer, item: str, *, fail: bool = False) -> None:
    with Session(engine) as session, session.begin():
        session.execute(orders.insert().values(item=item))
        producer.send(session, Message("order.placed", {"item": item}, key=item, tag="vip"))
        if fail:
            raise ValueError("no")


def count(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(orders)).scalar_one())


def test_what_a_service_sends_is_seen(
    notify_server: InMemoryServer, engine: sa.Engine, producer: TransactionProducer
) -> None:
    place_order(engine, producer, "book")
    with pytest.raises(ValueError, match="no"):
        place_order(engine, producer, "pen", fail=True)
    (message,) = notify_server.wait_for("order.placed", 1)
    assert (message.json(), message.key, message.tag, message.state) == ({"item": "book"}, "book", "vip", "COMMITTED")
    notify_server.wait_until_decided()
    assert notify_server.messages("nothing") == [] and len(notify_server.messages()) == 1
    with pytest.raises(AssertionError, match="has 1 messages"):
        notify_server.wait_for("order.placed", 2, seconds=0.1)


@pytest.mark.parametrize(("point", "messages"), [("after_half", 0), ("after_local_commit", 1)])
def test_the_service_crashes(
    notify_server: InMemoryServer, engine: sa.Engine, producer: TransactionProducer, point: str, messages: int
) -> None:
    """The database and the messages agree, whatever moment it was."""
    with crashing(point), pytest.raises(Crashed):
        place_order(engine, producer, "book")
    assert len(notify_server.halves("order.placed")) == 1
    notify_server.advance(1)
    notify_server.wait_until_decided()
    assert len(notify_server.messages("order.placed")) == messages == count(engine)
    place_order(engine, producer, "pen")  # and it goes on
    notify_server.wait_for("order.placed", messages + 1)
    with pytest.raises(InvalidRequest, match="after_half"), crashing("nowhere"):
        pass


def test_lost_outcomes_are_asked_back(
    notify_server: InMemoryServer, engine: sa.Engine, producer: TransactionProducer
) -> None:
    with notify_server.losing_outcomes():
        place_order(engine, producer, "book")
        assert len(notify_server.halves()) == 1
        notify_server.advance(1)
        notify_server.wait_until_decided()
    assert len(notify_server.messages("order.placed")) == 1


def test_a_listener_of_ones_own_is_asked(notify_server: InMemoryServer) -> None:
    asked: list[str] = []

    class Check(CheckMessageListener):
        topics = ("t",)

        def check(self, half: HalfMessage) -> Outcome:
            asked.append(half.messages[0].body.decode())
            return Outcome.COMMIT if half.messages[0].body == b"yes" else Outcome.ROLLBACK

    async def run() -> None:
        async with AsyncTransactionProducer(notify_server.url, group="g") as producer:
            producer.add_check_listener(Check())
            for body in ("yes", "no"):
                await producer.prepare([Message("t", body)], check_after=0.5)
            notify_server.advance(1)
            await asyncio.to_thread(notify_server.wait_until_decided)

    asyncio.run(run())
    assert [m.text for m in notify_server.messages("t")] == ["yes"] and set(asked) == {"yes", "no"}


def test_time_is_moved(notify_server: InMemoryServer) -> None:
    got: list[str] = []
    consumer = Consumer(notify_server.url, group="g")

    @consumer.subscribe("t", start="earliest")
    def handle(message: ReceivedMessage) -> None:
        got.append(message.text)

    with TransactionProducer(notify_server.url, group="p") as producer:
        producer.publish(Message("t", "in an hour", delay=3600))
    thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
    thread.start()
    try:
        time.sleep(0.5)
        assert got == []
        notify_server.advance(3600)
        deadline = time.monotonic() + 10
        while not got and time.monotonic() < deadline:
            time.sleep(0.01)
        assert got == ["in an hour"]
    finally:
        consumer.stop()
        thread.join()
    with pytest.raises(ValueError, match="not back"):
        notify_server.advance(-1)


def test_a_server_that_is_down_stops_the_commit(
    notify_server: InMemoryServer, engine: sa.Engine, producer: TransactionProducer
) -> None:
    with notify_server.down(), pytest.raises(TransactionRefused):
        place_order(engine, producer, "book")
    assert count(engine) == 0 and notify_server.messages() == []


def test_an_effect_takes_place_once_although_the_ack_is_lost(notify_server: InMemoryServer, engine: sa.Engine) -> None:
    consumer = Consumer(notify_server.url, group="stock", inbox=Inbox(engine), lease=1)

    @consumer.subscribe("t", start="earliest")
    def handle(message: ReceivedMessage, session: Session) -> None:
        session.execute(orders.insert().values(item=message.text))

    with TransactionProducer(notify_server.url, group="p") as producer:
        producer.publish(Message("t", "once"))
    thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
    thread.start()
    try:
        with notify_server.losing_answers("/v1/groups/stock/settle"):
            deadline = time.monotonic() + 10
            while count(engine) < 1 and time.monotonic() < deadline:
                time.sleep(0.02)
            notify_server.advance(2)
            time.sleep(0.5)
        notify_server.advance(2)
        time.sleep(0.5)
        assert count(engine) == 1
    finally:
        consumer.stop()
        thread.join()


class Order(pydantic.BaseModel):
    item: str
    price: int


@dataclass
class Plain:
    item: str
    price: int


class Struct(msgspec.Struct):
    item: str
    price: int


@pytest.mark.parametrize("kind", [Order, Plain, Struct])
def test_typed_payloads(notify_server: InMemoryServer, kind: Any) -> None:
    with TransactionProducer(notify_server.url, group="p") as producer:
        producer.publish(Message("t", kind(item="book", price=7)))
    (stored,) = notify_server.wait_for("t", 1)
    received = ReceivedMessage("i", "t", 0, 0, stored.body, None, None, {}, 1, "")
    assert received.json() == {"item": "book", "price": 7}
    assert received.decode(kind) == kind(item="book", price=7)
    wrong = ReceivedMessage("i", "t", 0, 0, b'{"item": 1}', None, None, {}, 1, "")
    with pytest.raises(DeadLetter, match=kind.__name__):
        wrong.decode(kind)
