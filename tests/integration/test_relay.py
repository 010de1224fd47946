"""Several relays of one database: a commit wakes them, keys stay in order; also on the server's own table."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message
from notify.errors import Unavailable, WrongRole
from notify.movers.relay.leases import BUCKETS, PostgreSqlLeases
from notify.movers.relay.relay import Relay
from notify.runtime.databases import UNSENT
from notify.storage.sql.engines import opened
from notify.storage.sql.tables import server_half_message
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import bodies, drain, subscribe
from tests.support.http import call
from tests.support.servers import Started, make_storage, stop_if_running
from tests.support.shop import Base, Order, make_engine
from tests.support.sql_storage import published, put, put_in_every_state

NEVER = 300.0
"""An interval between two looks, in seconds, so long that only a notification makes a relay move a message; the longest
with which a relay listens."""


@pytest.fixture(scope="module")
def postgresql(database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a database with the shop's tables and an outbox, which each test leaves empty."""
    with empty_database("postgresql", database_urls, tmp_path_factory.mktemp("outbox")) as url:
        engine = make_engine(url)
        create_tables(engine)
        Base.metadata.create_all(engine)
        engine.dispose()
        yield url


@pytest.fixture
def engines(postgresql: str) -> Iterator[list[sa.Engine]]:
    """Four engines of that database: one for a producer, three for relays."""
    made = [make_engine(postgresql) for _ in range(4)]
    yield made
    for engine in made:
        engine.dispose()


class Outbox:
    """A producer that writes into its database only; `sent` counts its messages."""

    def __init__(self, engine: sa.Engine, topic: str) -> None:
        self.sent = 0
        self._engine, self._topic = engine, topic
        self._producer = TransactionProducer("http://127.0.0.1:9", group=topic, engine=engine, mode="outbox")

    def send(self, count: int, keys: int) -> None:
        """Send `count` more messages, each in a transaction of its own, with `keys` keys in turn."""
        for n in range(self.sent, self.sent + count):
            key = f"k{n % keys}"
            with Session(self._engine) as session, session.begin():
                session.add(Order(item=str(n)))
                self._producer.send(session, Message(self._topic, f"{key} {n}", key=key))
        self.sent += count

    def waiting(self) -> int:
        """How many of its messages no relay has marked as sent."""
        t = half_message.c
        wanted = sa.select(sa.func.count()).where(t.topic == self._topic, t.relayed == UNSENT)
        with self._engine.connect() as connection:
            return int(connection.scalar(wanted) or 0)

    def close(self) -> None:
        self._producer.close()


@pytest.mark.long
def test_several_relays_share_the_keys_and_keep_their_order(
    engines: list[sa.Engine], server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox = Outbox(engines[0], unique)
    relays = [Relay(engine, server.url) for engine in engines[1:]]

    def until_these_send(*some: Relay) -> None:
        before = [relay.total.sent for relay in some]

        def have_sent() -> bool:
            outbox.send(20, 20)
            return all(relay.total.sent > sent for relay, sent in zip(some, before, strict=True))

        eventually(have_sent, "each of them to send")

    first, second, third = relays
    with in_background(first.run(interval=0.05)) as relaying, in_background(second.run(interval=0.05)):
        until_these_send(first, second)
        with in_background(third.run(interval=0.05)):
            until_these_send(first, second, third)
            relaying.stop()  # the others take over its buckets
            until_these_send(second, third)
            # The totals lack what the stopped relay's thread marked afterwards.
            eventually(lambda: not outbox.waiting(), "all to be relayed")
    outbox.close()
    by_key: dict[str, list[int]] = defaultdict(list)
    for body in bodies(drain(server.url, unique, unique, outbox.sent)):
        key, n = body.split()
        by_key[key].append(int(n))
    assert {key: sorted(numbers) for key, numbers in by_key.items()} == dict(by_key)
    assert sum(map(len, by_key.values())) == outbox.sent


def test_buckets_are_shared_and_come_back(engines: list[sa.Engine]) -> None:
    first, second, third = (PostgreSqlLeases(engine) for engine in engines[1:])
    assert first.renew("public") and first.all()
    second.renew("public")
    for leases in (first, second, first, second):
        leases.renew("public")
    assert len(first.held) == len(second.held) == BUCKETS // 2 and not first.held & second.held
    first.close()
    eventually(lambda: second.renew("public") and second.all(), "the session of the first to end")
    third.close()
    second.close()


def test_a_commit_wakes_the_relay(engines: list[sa.Engine], server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    outbox = Outbox(engines[0], unique)
    relay = Relay(engines[1], server.url)
    with in_background(relay.run(interval=NEVER)) as relaying:
        for n in range(5):
            outbox.send(1, 1)
            relaying.until(lambda n=n: relay.total.sent == n + 1, "the relay to be woken")  # type: ignore[misc]
    outbox.close()
    assert len(drain(server.url, unique, unique, 5)) == 5


def test_a_relay_goes_on_when_the_session_that_waits_is_ended(
    engines: list[sa.Engine], server: ServerProcess, unique: str
) -> None:
    """A restart of the database ends the waiting session: the driver raises its own error, past SQLAlchemy."""
    subscribe(server.url, unique, unique)
    outbox = Outbox(engines[0], unique)
    waiting = "FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid != pg_backend_pid()"
    own = "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"

    def end_the_session() -> bool:
        with engines[0].connect() as connection:
            return bool(connection.exec_driver_sql(f"SELECT count(pg_terminate_backend(pid)) {waiting} {own}").scalar())

    with in_background(Relay(engines[1], server.url).run(interval=NEVER)) as relaying:
        relaying.until(end_the_session, "the relay to wait")
        outbox.send(1, 1)
        assert len(drain(server.url, unique, unique, 1)) == 1
    outbox.close()


def test_a_relay_that_is_stopped_waits_for_its_threads(engines: list[sa.Engine], server: ServerProcess) -> None:
    """The caller of `stop` disposes of the engine next: no thread may hold a connection of it then."""
    relays_own, other = engines[1], engines[0]

    def relay_waits() -> bool:
        with other.connect() as connection:
            waiting = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            return bool(connection.exec_driver_sql(f"SELECT count(*) {waiting}").scalar())

    async def run() -> None:
        task = asyncio.create_task(Relay(relays_own, server.url).run())
        await asyncio.to_thread(eventually, relay_waits, "the relay to wait for the table")
        task.cancel()
        # A shorter wait would only miss a fault, never report a false one.
        assert not (await asyncio.wait([task], timeout=0.3))[0]
        locking.rollback()
        await asyncio.wait([task])

    with other.connect() as locking:
        locking.exec_driver_sql("LOCK TABLE half_message IN ACCESS EXCLUSIVE MODE")
        asyncio.run(run())
    pool = relays_own.pool
    assert isinstance(pool, sa.QueuePool) and pool.checkedout() == 0


def test_a_relay_whose_rows_are_locked_says_so_and_sends_nothing_twice(
    engines: list[sa.Engine], server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited without a word for whoever had locked its rows, and could not be stopped meanwhile."""
    monkeypatch.setattr("notify.movers.relay.leases.LOCK_SECONDS", 0.1)
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engines[0], mode="outbox") as producer:
        with Session(engines[0]) as session:
            producer.send(session, Message(unique, "once"))
            session.commit()
    relay = Relay(engines[1], server.url)
    with engines[2].connect() as other:
        other.exec_driver_sql("SELECT 1 FROM half_message FOR UPDATE")
        with pytest.raises(Unavailable, match="lock timeout"):
            asyncio.run(relay.run(once=True))

    def are_free() -> bool:
        with engines[0].connect() as connection:
            locks = "FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database"
            return not connection.exec_driver_sql(
                f"SELECT count(*) {locks} WHERE datname = current_database())"
            ).scalar()

    eventually(are_free, "the end of the session with the relay's locks")
    assert asyncio.run(relay.run(once=True)).sent == 1
    assert bodies(drain(server.url, unique, unique, 1)) == ["once"]


def test_making_the_tables_again_waits_for_nobody(engines: list[sa.Engine]) -> None:
    """`create_tables` takes no lock that waits for a running transaction: it leaves an existing trigger as it is."""
    engine = engines[0]
    with engine.connect() as running:
        running.exec_driver_sql(
            "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic,"
            " relayed, created_at) VALUES ('x', 0, 'g', 'half', 'COMMITTED', '', 't', 1, now())"
        )
        with engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")  # no statement waits for a lock
            create_tables(connection)
        running.rollback()


@pytest.mark.long
def test_the_servers_table_is_relayed(engine_url: str, server: ServerProcess, unique: str) -> None:
    make_storage(engine_url)
    subscribe(server.url, unique, unique)
    committed = put_in_every_state(engine_url, unique)
    with opened(engine_url) as engine:
        totals = [asyncio.run(Relay(engine, server.url).run(once=True)) for _ in range(2)]
    assert [(total.sent, total.refused) for total in totals] == [(20, 0), (0, 0)]
    messages = drain(server.url, unique, unique, 40)
    assert sorted(json.loads(m["body"])["n"] for m in messages) == sorted(committed)
    assert {(m["key"], m["tag"], m["headers"]["h"]) for m in messages} == {("k", "t", "ü")}


@pytest.mark.long
def test_messages_published_without_a_transaction_are_relayed(
    engine_url: str, server: ServerProcess, unique: str
) -> None:
    """A row without a producer group is relayed. It ended the relay, and with it the way of every other message."""
    make_storage(engine_url)
    subscribe(server.url, unique, unique)
    put(engine_url, [*published(unique, "a"), *published(unique, "of a group", group="g"), *published(unique, "b")])
    with opened(engine_url) as engine:
        totals = [asyncio.run(Relay(engine, server.url).run(once=True)) for _ in range(2)]
    assert [(total.sent, total.refused) for total in totals] == [(3, 0), (0, 0)]
    assert sorted(bodies(drain(server.url, unique, unique, 3))) == ["a", "b", "of a group"]


@pytest.mark.long
def test_a_relay_sends_a_server_without_queues_nothing_of_its_own_table(
    database_urls: Mapping[str, str], tmp_path: Path, unique: str
) -> None:
    """Such a server has the message already, in that table. The relay took that for sent, and nobody ever got it."""
    with empty_database("postgresql", database_urls, tmp_path) as url, ExitStack() as stack:
        make_storage(url)
        server = Started(url, tmp_path, stack).add()
        call(server.url, "POST", "/v1/messages", {"messages": [{"topic": unique, "body": "x"}]})
        engine = make_engine(url)
        stack.callback(engine.dispose)
        moving = Relay(engine, server.url)
        with pytest.raises(WrongRole, match="has no queues"):
            asyncio.run(moving.run(once=True))
        with engine.connect() as connection:
            assert connection.scalars(sa.select(server_half_message.c.relayed)).all() == [UNSENT]
        queue = ServerProcess(tmp_path / "queue", flags=["--registry", url, "--roles", "queue"]).start()
        stack.callback(stop_if_running, queue)
        assert asyncio.run(Relay(engine, queue.url).run(once=True)).sent == 1
