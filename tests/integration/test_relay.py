"""Several relays of one database: woken, keys in order, nothing twice; and the server's own table as the outbox."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify import ids
from notify.binlog_bridge.leases import BUCKETS, PostgreSqlLeases
from notify.binlog_bridge.relay import Relay
from notify.client import Message, TransactionProducer, create_tables
from notify.testing.process import ServerProcess
from notify.wire import Payload, encode_msgpack
from storage.sql import schema
from storage.sql.store import SqlStore
from storage.store import NewMessage, NewTransaction, State
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import drain, subscribe
from tests.support.shop import Base, Order, make_engine


def outbox(engine: sa.Engine, group: str) -> TransactionProducer:
    Base.metadata.create_all(engine)
    return TransactionProducer("http://127.0.0.1:9", group=group, engine=engine, mode="outbox")


def send(producer: TransactionProducer, engine: sa.Engine, topic: str, key: str, n: int) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(item=str(n)))
        producer.send(session, Message(topic, {"key": key, "n": n, "at": time.time()}, key=key))


def test_several_relays_share_the_keys_and_keep_their_order(
    database_urls: dict[str, str], server: ServerProcess, unique: str, tmp_path: object
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:  # type: ignore[arg-type]
        engine = make_engine(url)
        create_tables(engine)
        subscribe(server.url, unique, unique)
        producer = outbox(engine, unique)

        async def run() -> None:
            engines = [make_engine(url) for _ in range(3)]
            relays = [Relay(e, server.url) for e in engines]
            tasks = [asyncio.ensure_future(r.run(interval=0.05)) for r in relays[:2]]
            for n in range(300):
                await asyncio.to_thread(send, producer, engine, unique, f"k{n % 20}", n)
                if n == 100:
                    tasks.append(asyncio.ensure_future(relays[2].run(interval=0.05)))
                if n == 200:
                    tasks[0].cancel()  # its buckets go to the others
            deadline = time.monotonic() + 20
            while sum(r.total.sent for r in relays) < 300 and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for e in engines:
                e.dispose()
            assert sum(r.total.sent > 0 for r in relays) >= 2, [r.total for r in relays]

        asyncio.run(run())
        producer.close()
        by_key: dict[str, list[int]] = defaultdict(list)
        for m in drain(server.url, unique, unique, 300):
            body = json.loads(m["body"])
            by_key[body["key"]].append(body["n"])
        assert {k: sorted(v) for k, v in by_key.items()} == dict(by_key)
        assert sum(map(len, by_key.values())) == 300
        engine.dispose()


def test_buckets_are_shared_and_come_back(database_urls: dict[str, str], tmp_path: object) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:  # type: ignore[arg-type]
        engines = [make_engine(url) for _ in range(3)]
        first, second, third = (PostgreSqlLeases(e) for e in engines)
        assert first.renew() and len(first._held) == BUCKETS
        second.renew()
        for leases in (first, second, first, second):
            leases.renew()
        assert len(first._held) == len(second._held) == BUCKETS // 2 and not first._held & second._held
        first.close()
        eventually(lambda: second.renew() and len(second._held) == BUCKETS)
        third.close()
        second.close()
        for engine in engines:
            engine.dispose()


def test_a_commit_wakes_the_relay(
    database_urls: dict[str, str], server: ServerProcess, unique: str, tmp_path: object
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:  # type: ignore[arg-type]
        engine = make_engine(url)
        create_tables(engine)
        subscribe(server.url, unique, unique)
        producer = outbox(engine, unique)

        async def run() -> None:
            relay = Relay(engine, server.url)
            task = asyncio.ensure_future(relay.run(interval=30))  # far longer than the test waits
            await asyncio.sleep(1)
            for n in range(5):
                await asyncio.to_thread(send, producer, engine, unique, "k", n)
                deadline = time.monotonic() + 5
                while relay.total.sent <= n and time.monotonic() < deadline:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert relay.total.sent == n + 1
            task.cancel()
            # It sits in a thread until somebody notifies, or its interval is over.
            await asyncio.to_thread(send, producer, engine, unique, "k", 9)
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(run())
        producer.close()
        engine.dispose()


def test_making_the_tables_again_waits_for_nobody(database_urls: dict[str, str], tmp_path: object) -> None:
    """A service that starts must not hold up those that run: the trigger is not made anew."""
    with empty_database("postgresql", database_urls, tmp_path) as url:  # type: ignore[arg-type]
        engine = make_engine(url)
        create_tables(engine)
        with engine.connect() as running:
            running.exec_driver_sql(
                "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic,"
                " relayed, created_at) VALUES ('x', 0, 'g', 'half', 'COMMITTED', '', 't', 1, now())"
            )
            with engine.begin() as connection:
                connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
                create_tables(connection)
            running.rollback()
        engine.dispose()


def test_the_servers_table_is_relayed(
    database: str, database_urls: dict[str, str], server: ServerProcess, unique: str, tmp_path: object
) -> None:
    with empty_database(database, database_urls, tmp_path) as url:  # type: ignore[arg-type]
        subscribe(server.url, unique, unique)

        async def run() -> None:
            store = SqlStore(url)
            schema.upgrade(store.engine, "main")
            await store.open(0)
            now = time.time_ns() // 1000
            payload = encode_msgpack(Payload(unique, b"body", "k", "t", {"h": "v"}))
            made = [NewTransaction(ids.new_id(), "g", [NewMessage(unique, payload, "k", "t")] * 2) for _ in range(30)]
            await store.put(made, now)
            states = (State.COMMITTED, State.ROLLED_BACK, None)
            outcomes = [(t.id, "g", states[n % 3]) for n, t in enumerate(made)]
            await store.decide([o for o in outcomes if o[2] is not None], now)  # type: ignore[misc]
            for expected in (10, 10):
                total = await relay.run(once=True)
                assert (total.sent, total.refused) == (expected, 0)
            await store.close()

        engine = make_engine(url)
        relay = Relay(engine, server.url)
        asyncio.run(run())
        engine.dispose()
        found = drain(server.url, unique, unique, 20)
        assert {(m["body"], m["key"], m["tag"], m["headers"]["h"]) for m in found} == {("body", "k", "t", "v")}
