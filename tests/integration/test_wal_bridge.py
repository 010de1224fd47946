"""The bridge on PostgreSQL's log: which rows it moves, which sources it refuses; it never skips a row silently."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Superseded
from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql import schema
from notify.storage.sql.store import SqlStore
from notify.testing.process import ServerProcess
from tests.support.bridges import end_once_while_written, move, numbers, outbox
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.groups import drain, subscribe
from tests.support.http import admin


@pytest.fixture
def url(wal_url: str) -> str:
    return wal_url


def test_outbox_rows_reach_the_log_once_in_commit_order(url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    for first in (0, 20, 40):
        outbox(url, unique, range(first, first + 20))
        bridge = move(url, server)
        # The first time the tables are read, since a slot has nothing from before it was made.
        assert (bridge.totals.rows, bridge.totals.stored) == (15 if first else 0, 15)
    wanted = [n for n in range(60) if n % 4 != 3]
    assert numbers(server, unique, 45) == wanted
    assert drain(server.url, unique, unique, 0) == []
    shown = next(b for b in admin(server.url, "GET", "bridges")["bridges"] if b["source"] == bridge.name)
    assert shown["rows"] == 45 and shown["lag_seconds"] >= 0 and shown["silent_seconds"] >= 0


@pytest.mark.parametrize("what", ["other rows", pytest.param("messages", marks=pytest.mark.long)])
def test_once_ends_where_the_log_ended_at_the_start(url: str, server: ServerProcess, unique: str, what: str) -> None:
    """Beside servers, whose heartbeats go to the log, `notify bridge --once` did not end."""
    end_once_while_written(url, server, unique, what)


@pytest.mark.long
def test_the_servers_table_is_bridged_when_it_commits(url: str, server: ServerProcess, unique: str) -> None:
    """Bodies are long: the log has them with an update only if the replica identity is FULL."""
    subscribe(server.url, unique, unique)
    now = time.time_ns() // 1000
    long = os.urandom(10_000).hex()

    async def run(first: int) -> None:
        store = SqlStore(url)
        schema.upgrade(store.engine, "main")
        await store.open(0)
        made = []
        for n in range(first, first + 40):
            messages = []
            for part in range(2):
                body = json.dumps({"n": 2 * n + part, "long": long}).encode()
                payload = encode_msgpack(Payload(unique, body, "k", "t", {"h": "ü"}))
                messages.append(NewMessage(unique, payload, "k", "t"))
            made.append(NewTransaction(ids.new_id(), "g", messages))
        await store.put(made[:30], now)
        await store.put([NewTransaction(t.id, "g", t.messages, committed=True) for t in made[30:]], now)
        for n, t in enumerate(made[:30]):
            if n % 3 < 2:
                await store.decide([(t.id, "g", (State.COMMITTED, State.ROLLED_BACK)[n % 3])], now)
        await store.close()

    asyncio.run(run(0))
    assert move(url, server).totals.stored == 20
    asyncio.run(run(40))
    bridge = move(url, server)
    assert (bridge.totals.stored, bridge.totals.rows) == (20, 40)
    committed = [*range(0, 30, 3), *range(30, 40), *range(40, 70, 3), *range(70, 80)]
    received = numbers(server, unique, 80)
    assert sorted(received) == sorted(2 * n + part for n in committed for part in range(2))
    # The messages of a transaction stay together, in their order.
    assert all(second == first + 1 for first, second in zip(received[::2], received[1::2], strict=True))


@pytest.mark.long
def test_a_second_bridge_takes_over_and_the_first_stops(url: str, server: ServerProcess, unique: str) -> None:
    outbox(url, unique, range(2))

    async def run() -> None:
        first = Bridge([url], server.url)
        task = asyncio.ensure_future(first.run())
        await eventually_async(lambda: first.totals.connections, "the first bridge to read")
        second = Bridge([url], server.url)
        other = asyncio.ensure_future(second.run())
        with pytest.raises(Superseded):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        await asyncio.to_thread(outbox, url, unique, range(4, 6))
        await eventually_async(lambda: second.totals.rows >= 2, "the second bridge to move both rows")
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.long
def test_messages_after_a_lost_slot_are_backfilled(url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(4))
    bridge = move(url, server)
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    engine.dispose()
    outbox(url, unique, range(4, 8))
    with pytest.raises(Exception, match=r"has no slot .*--backfill"):
        move(url, server)
    move(url, server, fill=True)
    outbox(url, unique, range(8, 12))
    assert move(url, server).totals.rows == 3
    assert sorted(numbers(server, unique, 9)) == [n for n in range(12) if n % 4 != 3]
    assert drain(server.url, unique, unique, 0) == [] and bridge.name
