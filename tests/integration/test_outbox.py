"""mode=outbox: it needs no server; the relay moves each message once, in order, on each database; and the purge."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from notify.check.question import read_source
from notify.client import AsyncTransactionProducer, Inbox, Message, TransactionProducer
from notify.client.tables.definitions import half_message, notify_inbox, notify_source
from notify.client.tables.purge import counts, purge, purge_by_force
from notify.errors import InvalidRequest, TooLarge, Unavailable
from notify.movers.outbox import LOCAL
from notify.movers.relay.relay import Relay
from notify.testing.process import ServerProcess
from tests.support.background import repeated
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.dying import lose_outcomes
from tests.support.groups import bodies, drain, subscribe
from tests.support.shop import Base, Order, make_async_engine


def move(engine: sa.Engine, url: str) -> tuple[int, int]:
    done = asyncio.run(Relay(engine, url).run(once=True))
    return done.sent, done.refused


def test_outbox_waits_for_the_relay(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    Base.metadata.create_all(engine)
    subscribe(server.url, unique, unique)
    # The producer's server is away: an outbox needs none.
    producer = TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox")
    for n in range(30):
        with Session(engine) as session, session.begin():
            session.add(Order(item=str(n)))
            for part in range(2):
                message = Message(unique, {"n": n, "part": part}, key=str(n), tag="x", headers={"h": "v"})
                producer.send(session, message)
            if n % 3 == 2:
                session.rollback()
    producer.close()
    with pytest.raises(Unavailable):
        asyncio.run(Relay(engine, "http://127.0.0.1:9").run(once=True))
    assert counts(engine)["waiting_for_relay"] == 40
    assert move(engine, server.url) == (20, 0)
    assert move(engine, server.url) == (0, 0)
    drained = drain(server.url, unique, unique, 40)
    assert [json.loads(m["body"]) for m in drained] == [
        {"n": n, "part": p} for n in range(30) if n % 3 != 2 for p in range(2)
    ]
    first = drained[0]
    assert first["tag"] == "x" and first["key"] == "0" and first["headers"]["h"] == "v"


def test_a_relay_that_runs_once_moves_what_waited_at_the_start(
    shop_engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """It continued as long as a service wrote."""
    subscribe(server.url, unique, unique)
    relay = Relay(shop_engine, server.url)
    with TransactionProducer("http://127.0.0.1:9", group=unique, engine=shop_engine, mode="outbox") as producer:

        def write(body: str = "later") -> None:
            with Session(shop_engine) as session, session.begin():
                producer.send(session, Message(unique, body, key="k"))

        for n in range(20):
            write(str(n))
        with repeated(write, threads=1, pause_seconds=0.001, passing=()):
            total = asyncio.run(asyncio.wait_for(relay.run(once=True), PATIENCE_SECONDS))
    assert total.refused == 0
    assert bodies(drain(server.url, unique, unique, 20))[:20] == [str(n) for n in range(20)]
    with shop_engine.connect() as connection:
        assert LOCAL.newest(connection) is not None, "what was written later waits for the next run"


def test_an_outbox_with_asyncio_drivers(engine: sa.Engine) -> None:
    """With aiomysql and PyMySQL 1.2 each send failed: 'str' object is not callable."""

    async def scenario() -> None:
        async_engine = make_async_engine(engine.url)
        producer = AsyncTransactionProducer(
            "http://127.0.0.1:9", group="g", engine=async_engine, mode="outbox", answer_checks=False, purge_after=None
        )
        async with producer, AsyncSession(async_engine) as session, session.begin():
            for body in (bytes(range(256)), b"", {"n": 1}):
                await producer.send(session, Message("t", body))
        await async_engine.dispose()

    asyncio.run(scenario())
    with engine.connect() as connection:
        rows = connection.scalars(sa.select(half_message.c.body).order_by(half_message.c.message_no))
        assert [bytes(body) for body in rows] == [bytes(range(256)), b"", b'{"n":1}']


def test_a_crash_between_sending_and_marking_doubles_nothing(
    engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox") as producer:
        for n in range(5):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, str(n)))
    assert move(engine, server.url) == (5, 0)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE half_message SET relayed = 0"))
    assert move(engine, server.url) == (5, 0)
    assert bodies(drain(server.url, unique, unique, 5)) == [str(n) for n in range(5)]


def test_rows_refused_by_the_server_stay_visible(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox") as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "x"))
        with engine.begin() as connection:  # an older SDK wrote this row without the check
            too_late = datetime.now(UTC).replace(tzinfo=None) + timedelta(days=41)
            connection.execute(half_message.update().values(deliver_at=too_late))
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "good"))
    assert move(engine, server.url) == (1, 1)
    assert counts(engine)["refused_by_server"] == 1


def test_send_refuses_messages_that_no_queue_accepts(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    """`send` refuses such a message. It was committed, refused by the queue later, and never delivered."""
    too_late = datetime.now(UTC) + timedelta(days=41)
    with TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox") as producer:
        for wrong in (
            Message(unique, b"x" * 1_100_000),
            Message("no topic", "x"),
            Message(unique, "x", delay=41 * 86_400.0),
            Message(unique, "x", deliver_at=too_late),
            Message(unique, "x", key="k" * 1025),
            Message(unique, "x", headers={f"h{n}": "v" for n in range(33)}),
        ):
            with Session(engine) as session, session.begin():
                with pytest.raises((InvalidRequest, TooLarge)):
                    producer.send(session, wrong)
        with Session(engine) as session, session.begin():
            for _ in range(8):
                producer.send(session, Message(unique, b"x" * 1_000_000))
            with pytest.raises(TooLarge, match="transaction's messages"):
                producer.send(session, Message(unique, b"x" * 1_000_000))
            session.rollback()
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "good", deliver_at=datetime.now(UTC) + timedelta(days=39)))
    assert move(engine, server.url) == (1, 0)


def test_purge_asks_first(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    lost = TransactionProducer(server.url, group=unique, engine=engine, answer_checks=False)
    lose_outcomes(lost)
    with Session(engine) as session, session.begin():
        lost.send(session, Message(unique, "open"))
    lost.close()
    with TransactionProducer(server.url, group=unique, engine=engine, answer_checks=False) as producer:
        for n in range(3):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, str(n)))
    rows = 0

    def only_the_open_one_is_left() -> bool:
        nonlocal rows
        rows += asyncio.run(purge(engine, server.url, older_than=0)).rows
        return counts(engine)["done"] == 1

    eventually(only_the_open_one_is_left, "decided rows to be purged")
    result = asyncio.run(purge(engine, server.url, older_than=0))
    assert (rows, result.rows, result.kept) == (3, 0, 1)
    assert purge_by_force(engine, older_than=0).rows == 1
    with engine.connect() as connection:
        assert read_source(connection)[1] > 0


def test_the_inbox_is_purged_by_time_and_says_so(engine: sa.Engine) -> None:
    now = datetime.now(UTC).replace(tzinfo=None)
    rows = [
        {"consumer_group": f"g{n % 2}", "message_id": f"m{n}", "created_at": now - timedelta(days=n)} for n in range(6)
    ]
    with engine.begin() as connection:
        connection.execute(notify_inbox.insert(), rows)
    inbox = Inbox(engine)
    with pytest.raises(InvalidRequest, match="at least"):
        inbox.purge(3600)
    age = 2.5 * 86_400
    begun = time.time()
    assert inbox.purge(age, batch=2) == 3
    ended = time.time()
    with engine.connect() as connection:
        left = sorted(connection.scalars(sa.select(notify_inbox.c.message_id)))
        from_ms = connection.execute(sa.select(notify_source.c.inbox_from)).scalar_one()
    assert left == ["m0", "m1", "m2"]
    assert begun - 1 <= from_ms / 1000 + age <= ended + 1  # the database's clock may count in seconds


def test_rows_of_halves_keep_the_whole_message_where_the_producer_asks_for_it(
    engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """They are what a repair publishes again from; no relay moves them."""
    subscribe(server.url, unique, unique)
    producer = TransactionProducer(server.url, group=unique, engine=engine, keep_messages=True)
    moment = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, {"n": 1}, key="k", tag="x", headers={"h": "v"}, ttl=90))
        producer.send(session, Message(unique, "later", deliver_at=moment))
    assert [m["body"] for m in drain(server.url, unique, unique, 1)] == ['{"n":1}']
    producer.close()
    t = half_message.c
    with engine.connect() as connection:
        rows = connection.execute(
            sa.select(t.mode, t.relayed, t.body, t.key, t.tag, t.headers, t.ttl, t.deliver_at).order_by(t.message_no)
        ).all()
    first = rows[0]
    assert (first.mode, first.relayed, first.body, first.key, first.tag) == ("half", 1, b'{"n":1}', "k", "x")
    assert (json.loads(first.headers)["h"], first.ttl, first.deliver_at) == ("v", 90.0, None)
    assert rows[1].body == b"later" and rows[1].deliver_at == moment.replace(tzinfo=None)
    assert move(engine, server.url) == (0, 0)
