"""notify.testing as a service's tests use it: messages, time, lost outcomes, a crash of the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check import CheckMessageListener, HalfMessage, Outcome
from notify.client import AsyncTransactionProducer, Consumer, Inbox, Message, TransactionProducer
from notify.errors import DeadLetter, InvalidRequest, TransactionRefused
from notify.protocol.message import ReceivedMessage
from notify.testing import Crashed, InMemoryServer, crashing
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import lag, publish, running
from tests.support.http import metric
from tests.support.shop import Order, items


@pytest.fixture
def engine(sqlite_engine: sa.Engine) -> sa.Engine:
    return sqlite_engine


@pytest.fixture
def producer(notify_server: InMemoryServer, engine: sa.Engine) -> Iterator[TransactionProducer]:
    """A producer of a server whose clock only the test moves: a check comes when the test says so."""
    notify_server.freeze()
    with TransactionProducer(notify_server.url, group="orders", engine=engine, check_after=0.5) as made:
        yield made


def place_order(engine: sa.Engine, producer: TransactionProducer, item: str, *, fail: bool = False) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(item=item))
        producer.send(session, Message("order.placed", {"item": item}, key=item, tag="vip"))
        if fail:
            raise ValueError("no")


def test_a_test_sees_what_its_service_sends(
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
    """After a crash at any point the database and the messages agree."""
    with crashing(point), pytest.raises(Crashed):
        place_order(engine, producer, "book")
    assert len(notify_server.halves("order.placed")) == 1
    notify_server.advance(1)
    notify_server.wait_until_decided()
    assert len(notify_server.messages("order.placed")) == messages == len(items(engine))
    place_order(engine, producer, "pen")  # the service continues
    notify_server.wait_for("order.placed", messages + 1)
    with pytest.raises(InvalidRequest, match="after_half"), crashing("nowhere"):
        pass


@pytest.mark.long
def test_an_outcome_that_is_lost_stays_lost(
    notify_server: InMemoryServer, engine: sa.Engine, producer: TransactionProducer
) -> None:
    """The producer sends it again, or for the first time, once the block is over: a service's test was a race."""
    notify_server.freeze()
    with notify_server.losing_outcomes():
        place_order(engine, producer, "book")
    sent = notify_server._app.faults.answered
    eventually(lambda: sent["/v1/transactions/outcomes"] >= 2, "the outcome was sent twice")
    assert [half.state for half in notify_server.halves()] == ["PREPARED"]
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

    notify_server.freeze()

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
    seen: list[str] = []
    consumer = Consumer(notify_server.url, group="g")

    @consumer.subscribe("t", start="earliest")
    def handle(message: ReceivedMessage) -> None:
        seen.append(message.text)

    with TransactionProducer(notify_server.url, group="p") as producer:
        producer.publish(Message("t", "in an hour", delay=3600))
        producer.publish(Message("t", "now"))
    with running(consumer, subscribed=True):
        # An acknowledged message does not come again when its lease is over.
        eventually(lambda: lag(notify_server.url, "g") == 0, "the first message to be acknowledged")
        assert seen == ["now"]
        before = notify_server.now
        notify_server.advance(3600)
        assert (notify_server.now - before).total_seconds() >= 3600
        assert len(notify_server.messages("t")) == 2  # when `advance` returns, the server has acted
        eventually(lambda: len(seen) == 2, "the delayed message")
    assert seen == ["now", "in an hour"]
    with pytest.raises(ValueError, match="must not be negative"):
        notify_server.advance(-1)


def test_time_stands_still(notify_server: InMemoryServer) -> None:
    notify_server.freeze()
    before = notify_server.now
    notify_server.advance(0.25)
    notify_server.freeze()
    assert (notify_server.now - before).total_seconds() == 0.25


@pytest.mark.long
def test_it_restarts_with_what_it_holds(
    notify_server: InMemoryServer, engine: sa.Engine, producer: TransactionProducer
) -> None:
    place_order(engine, producer, "book")
    notify_server.wait_for("order.placed", 1)
    url = notify_server.url
    notify_server.restart()
    assert notify_server.url == url
    place_order(engine, producer, "pen")
    assert [m.key for m in notify_server.wait_for("order.placed", 2)] == ["book", "pen"]


async def test_it_stops_where_a_loop_is_running(unique: str) -> None:
    """A coroutine, or a notebook: it raised RuntimeError, which hid what the test had raised."""
    with InMemoryServer() as server:
        publish(server.url, unique, ["x"])


def test_a_server_that_is_down_stops_the_commit(notify_server: InMemoryServer, engine: sa.Engine) -> None:
    with TransactionProducer(notify_server.url, group="orders", engine=engine, half_timeout=0.2) as producer:
        with notify_server.down(), pytest.raises(TransactionRefused):
            place_order(engine, producer, "book")
    assert items(engine) == [] and notify_server.messages() == []


def test_an_effect_takes_place_once_although_the_message_comes_twice(
    notify_server: InMemoryServer, engine: sa.Engine
) -> None:
    """The ack of a handled message is lost; the server delivers it again, and the inbox prevents a second effect."""
    notify_server.freeze()
    has_begun, may_end = threading.Event(), threading.Event()
    consumer = Consumer(notify_server.url, group="stock", inbox=Inbox(engine))

    @consumer.subscribe("t", start="earliest")
    def handle(message: ReceivedMessage, session: Session) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        session.add(Order(item=message.text))

    with TransactionProducer(notify_server.url, group="p") as producer:
        producer.publish(Message("t", "once"))
    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        with notify_server.down():
            may_end.set()
            eventually(lambda: items(engine), "the effect")
            notify_server.advance(30)
        eventually(lambda: lag(notify_server.url, "stock") == 0, "the message to be settled")
    assert items(engine) == ["once"]
    assert metric(notify_server.url, "notify_redelivered_total") == 1


def test_a_request_answered_with_an_error_may_have_been_carried_out(
    notify_server: InMemoryServer, engine: sa.Engine
) -> None:
    settle = "/v1/groups/stock/settle"
    consumer = Consumer(notify_server.url, group="stock", inbox=Inbox(engine))

    @consumer.subscribe("t", start="earliest")
    def handle(message: ReceivedMessage, session: Session) -> None:
        session.add(Order(item=message.text))

    with TransactionProducer(notify_server.url, group="p") as producer, running(consumer):
        with notify_server.losing_answers(settle):
            producer.publish(Message("t", "once"))
            eventually(lambda: notify_server.answered(settle) >= 1, "the first answer to be lost")
            assert lag(notify_server.url, "stock") == 0  # the ack was carried out
        producer.publish(Message("t", "and another"))
        eventually(lambda: len(items(engine)) >= 2, "the next effect")
    assert items(engine) == ["once", "and another"]


class Placed(pydantic.BaseModel):
    item: str
    price: int


@dataclass
class Plain:
    item: str
    price: int


class Struct(msgspec.Struct):
    item: str
    price: int


@pytest.mark.parametrize("kind", [Placed, Plain, Struct])
def test_typed_payloads(frozen_server: InMemoryServer, unique: str, kind: Any) -> None:
    with TransactionProducer(frozen_server.url, group=unique) as producer:
        producer.publish(Message(unique, kind(item="book", price=7)))
    (stored,) = frozen_server.wait_for(unique, 1)
    received = ReceivedMessage("i", "t", 0, 0, stored.body, None, None, {}, 1, "")
    assert received.json() == {"item": "book", "price": 7}
    assert received.decode(kind) == kind(item="book", price=7)
    wrong = ReceivedMessage("i", "t", 0, 0, b'{"item": 1}', None, None, {}, 1, "")
    with pytest.raises(DeadLetter, match=kind.__name__):
        wrong.decode(kind)
