"""The real PgBouncer: services work in any mode, servers and relays in session mode only, and `doctor` says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check.question import read_source
from notify.client import Message, TransactionProducer, create_tables
from notify.errors import InvalidRequest, Unavailable
from notify.movers.relay.relay import Relay
from notify.runtime.pooler import SESSION, TRANSACTION, pool_mode
from notify.storage.sql.engines import visitor_engine
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.background import in_background
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.groups import bodies, drain, subscribe
from tests.support.http import post
from tests.support.pgbouncer import pgbouncer
from tests.support.servers import Started, make_storage, until_known
from tests.support.shop import Base, Order, Shop
from tests.support.transactions import half_request, new_id

Pooled = Callable[[str], str]
THREADS, ORDERS = 8, 80


@pytest.fixture
def direct(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database, without PgBouncer."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        yield url


@pytest.fixture
def pooled(direct: str, tmp_path: Path) -> Iterator[Pooled]:
    """A function from a pool mode to the URL of the same database through PgBouncer."""
    directory = tmp_path / "pgbouncer"
    directory.mkdir()
    with ExitStack() as stack:

        def through(mode: str) -> str:
            try:
                return stack.enter_context(pgbouncer(direct, mode, directory))
            except NotAvailable as reason:
                pytest.skip(str(reason))

        yield through


def test_a_pooler_is_seen(direct: str, pooled: Pooled) -> None:
    for url, mode in ((direct, ""), (pooled(SESSION), SESSION), (pooled(TRANSACTION), TRANSACTION)):
        engine = visitor_engine(url)
        assert [pool_mode(engine) for _ in range(3)] == [mode] * 3
        engine.dispose()
    assert pool_mode(sa.create_engine("sqlite://")) == ""


@pytest.mark.long
def test_servers_work_through_session_mode(direct: str, pooled: Pooled, tmp_path: Path) -> None:
    """Servers set a session's bounds by statement. They set them with the connection, which PgBouncer refuses."""
    make_storage(direct)
    with ExitStack() as stack:
        servers = Started(pooled(SESSION), tmp_path, stack)
        first, second = servers.add(), servers.add()
        for key in (None, "k"):
            name = new_id()
            half = half_request("g", name) if key is None else half_request("g", name, key=key)
            assert post(first.url, "/v1/transactions", half)["items"][0]["status"] == 201
            assert post(second.url, "/v1/transactions", half)["items"][0]["status"] == 200
            outcome = {"producer_group": "g", "outcomes": [{"id": name, "outcome": "COMMIT"}]}
            assert post(second.url, "/v1/transactions/outcomes", outcome)["items"][0]["state"] == "COMMITTED"
            states = {"producer_group": "g", "ids": [name]}
            assert post(first.url, "/v1/transactions/states", states)["items"][0]["state"] == "COMMITTED"
        until_known([first, second])


def test_servers_refuse_transaction_mode(direct: str, pooled: Pooled, tmp_path: Path) -> None:
    """In transaction mode prepared statements and bounds belong to a backend that other clients share."""
    make_storage(direct)
    through = pooled(TRANSACTION)
    server = ServerProcess(tmp_path / "s", flags=["--storage", through])
    with pytest.raises(Unavailable):
        server.start()
    assert "pool_mode = session" in "".join(server.output)
    queue = ServerProcess(tmp_path / "q", flags=["--registry", through, "--roles", "queue"])
    with pytest.raises(Unavailable):
        queue.start()
    assert "pool_mode = session" in "".join(queue.output)
    for words in (("upgrade",), ("nodes",), ("key-map", "--shards", "main")):
        code, refused = cli("storage", *words, "--storage", through, "--json")
        assert code == 2 and "pool_mode = session" in refused["text"], "its lock would exclude nobody"
    assert bounds_of(through) == bounds_of(direct)


def bounds_of(url: str) -> list[str]:
    """The bounds of the session that a client gets."""
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [str(connection.exec_driver_sql(f"SHOW {name}").scalar()) for name in names]


@pytest.mark.long
def test_an_audit_refuses_transaction_mode(direct: str, pooled: Pooled, tmp_path: Path) -> None:
    """It ended in Spark with an error of a prepared statement, and left its time limit to other clients."""
    through = pooled(TRANSACTION)
    ServerProcess(tmp_path / "log").start().stop()
    code, refused = cli("audit", "run", "--database", f"shop={through}", "--log", str(tmp_path / "log"), "--json")
    assert code == 2 and "--database shop: " in refused["text"] and "pool_mode = session" in refused["text"]
    assert bounds_of(through) == bounds_of(direct)


@pytest.mark.long
def test_a_relay_is_woken_in_session_mode_and_refuses_transaction_mode(
    direct: str, pooled: Pooled, server: ServerProcess, unique: str
) -> None:
    """In transaction mode no notification arrived, and two relays had the same keys, whose order was lost."""
    subscribe(server.url, unique, unique)
    engine = sa.create_engine(direct)
    create_tables(engine)
    producer = TransactionProducer(server.url, group=unique, engine=engine, mode="outbox")

    def send(body: str) -> None:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, body))

    session_mode, transaction_mode = (sa.create_engine(pooled(mode)) for mode in (SESSION, TRANSACTION))
    relay = Relay(session_mode, server.url)
    with in_background(relay.run(interval=300.0)) as relaying:
        for n in range(3):
            send(str(n))
            relaying.until(lambda n=n: relay.total.sent == n + 1, "the relay to be woken")  # type: ignore[misc]
    assert bodies(drain(server.url, unique, unique, 3)) == ["0", "1", "2"]
    send("3")
    with pytest.raises(InvalidRequest, match="pool_mode = session"):
        asyncio.run(Relay(transaction_mode, server.url).run(once=True))
    producer.close()
    for made in (engine, session_mode, transaction_mode):
        made.dispose()


@pytest.mark.long
def test_doctor_notices_a_pooler(direct: str, pooled: Pooled, server: ServerProcess) -> None:
    engine = sa.create_engine(direct)
    create_tables(engine)
    engine.dispose()
    for url, mode in ((direct, None), (pooled(SESSION), SESSION), (pooled(TRANSACTION), TRANSACTION)):
        answer = cli("doctor", "--url", server.url, "--dsn", url, "--json")[1]
        assert answer.get("pooler") == mode
        assert any("pooler in transaction mode" in finding for finding in answer["findings"]) == (mode == TRANSACTION)


@pytest.mark.long
@pytest.mark.parametrize("mode", [SESSION, TRANSACTION])
def test_services_work_through_any_mode(
    direct: str, pooled: Pooled, memory: InMemoryServer, unique: str, mode: str
) -> None:
    """A service's engine has prepared statements off, as transaction mode needs."""
    engine = sa.create_engine(pooled(mode), connect_args={"prepare_threshold": None}, pool_size=THREADS)
    create_tables(engine)
    Base.metadata.create_all(engine)
    shop = Shop(engine, memory, unique)

    def order(number: int) -> None:
        with shop.sessions() as session, session.begin():
            session.add(Order(item=str(number)))
            session.flush()
            with session.begin_nested() as savepoint:
                shop.send(session, f"{number} not")
                savepoint.rollback()
            shop.send(session, str(number))
            if number % 4 == 3:
                session.rollback()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(order, range(ORDERS), timeout=PATIENCE_SECONDS))
    wanted = sorted(str(n) for n in range(ORDERS) if n % 4 != 3)
    assert shop.delivered() == wanted
    assert shop.items() == wanted
    with engine.connect() as connection:
        assert read_source(connection)[0]
    engine.dispose()
