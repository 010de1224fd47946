"""Transactions that a person has had tried again are sent by the bridge, although its binlog lies behind them."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.announcing import announce, mover_of
from notify.client.tables.definitions import half_message, notify_refused
from notify.movers.refused import RETRY, WAITING, retry
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Payload, encode_msgpack
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.sql import schema
from notify.storage.sql.store import SqlStore
from notify.storage.sql.tables import server_half_message
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.process import ServerProcess
from tests.support.bridges import binlog_reader, move, move_until, numbers, outbox, poison
from tests.support.groups import subscribe

DAY_US = 86_400_000_000


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


def states(engine: sa.Engine) -> dict[str, str]:
    """The states of the list of refused messages, by transaction id."""
    with engine.connect() as connection:
        return {r.transaction_id: r.state for r in connection.execute(sa.select(notify_refused))}


@pytest.mark.long
def test_retention_leaves_what_is_to_be_tried_again(url: str, server: ServerProcess, unique: str) -> None:
    """The bridge's binlog lies behind it and it is not marked any more: only the list says that it is needed."""
    subscribe(server.url, unique, unique)

    async def publish(store: SqlStore, topic: str, n: int) -> str:
        payload = encode_msgpack(Payload(topic, json.dumps({"n": n}).encode()))
        made = NewTransaction(ids.new_id(), "g", [NewMessage(topic, payload)], committed=True)
        await store.put([made], time.time_ns() // 1000)
        return ids.to_text(made.id)

    async def run() -> None:
        store = SqlStore(url, retention_us=DAY_US)
        schema.upgrade(store.engine, "main")
        await store.open(0)
        bad = await publish(store, "no such topic", 1)
        good = await publish(store, unique, 2)
        bridge = await asyncio.to_thread(move, url, server)
        t = server_half_message.c
        with store.engine.begin() as connection:
            connection.execute(server_half_message.update().where(t.transaction_id == bad).values(topic=unique))
            assert retry(connection, [bad], "its topic is right now") == [bad]
            # The bridge read on for days meanwhile.
        bridge.totals.read_through_us = time.time_ns() // 1000 + 5 * DAY_US
        await asyncio.to_thread(announce, store.engine, mover_of(bridge.name), bridge.totals)
        assert await store.retain(time.time_ns() // 1000 + 3 * DAY_US) == 1
        with store.engine.connect() as connection:
            assert connection.scalars(sa.select(t.transaction_id)).all() == [bad], good
        await asyncio.to_thread(move_until, url, server, lambda: not states(store.engine))
        assert await store.retain(time.time_ns() // 1000 + 3 * DAY_US) == 1
        await store.close()

    asyncio.run(run())
    assert sorted(numbers(server, unique, 2)) == [1, 2]


@pytest.mark.long
def test_one_whose_rows_are_gone_waits_for_a_person_again(url: str, server: ServerProcess, unique: str) -> None:
    """A hundred of those kept every later one from being sent, and no list showed them."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    engine = sa.create_engine(url)
    first, lost = poison(engine), poison(engine)
    move(url, server)
    t = half_message.c
    with engine.begin() as connection:
        connection.execute(half_message.update().values(topic=unique))
        retry(connection, [first, lost], "its topic is right now")
        connection.execute(half_message.delete().where(t.transaction_id == lost))
    assert states(engine) == {first: RETRY, lost: RETRY}
    move_until(url, server, lambda: states(engine) == {lost: WAITING})
    with engine.connect() as connection:
        assert connection.scalars(sa.select(notify_refused.c.code)).all() == ["rows_gone"]
    numbers(server, unique, 2)
    engine.dispose()


@pytest.mark.long
def test_more_than_a_request_holds_is_tried_again(url: str, server: ServerProcess, unique: str) -> None:
    """All that was retried went in one batch: its refusal ended the bridge, and each one that was started after it."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    engine = sa.create_engine(url)
    body = json.dumps({"n": 1, "text": "x" * 500_000}).encode()
    bad = [poison(engine, body=body) for _ in range(LIMITS.request_bytes // len(body) + 1)]
    move(url, server)
    with engine.begin() as connection:
        connection.execute(half_message.update().values(topic=unique))
        assert len(retry(connection, bad, "its topic is right now")) == len(bad)
    move_until(url, server, lambda: not states(engine))
    assert len(numbers(server, unique, 1 + len(bad))) == 1 + len(bad)
    engine.dispose()


@pytest.mark.long
def test_a_bridge_that_may_not_use_the_registry_says_so_and_still_tries_again(
    url: str, binlog_server: MariaDbServer, server: ServerProcess, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One missing right kept it from trying again and from reporting, without a word."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    engine = sa.create_engine(url)
    schema.upgrade(engine, "main")
    bad = poison(engine)
    move(url, server)
    rights = {
        "*": "SELECT",
        "half_message": "UPDATE",
        "server_half_message": "UPDATE",
        "notify_refused": "INSERT, UPDATE, DELETE",
    }
    with engine.begin() as connection:
        connection.execute(half_message.update().values(topic=unique))
        retry(connection, [bad], "its topic is right now")
    with binlog_reader(binlog_server, url, unique, rights) as poor:
        move_until(poor, server, lambda: "INSERT and UPDATE on server_member" in caplog.text and not states(engine))
    assert len(numbers(server, unique, 2)) == 2
    engine.dispose()
