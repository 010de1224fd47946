"""Options of a service's engine are for its own statements: those of Notify run whatever they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.check import HalfMessage, LocalTransactionCheck, Outcome
from notify.check.local import answer
from notify.check.question import read_source
from notify.check.sources import Sources
from notify.client import (
    AsyncTransactionProducer,
    Inbox,
    Message,
    ReceivedMessage,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.client.tables.definitions import half_message
from notify.client.tables.old_rows import DAY
from notify.client.tables.purge import RowPurge, counts, purge, purge_by_force
from notify.client.transport.servers import Servers
from notify.runtime.databases import without_server_cursors
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.shop import make_engine
from tests.support.transactions import new_id, when_free

CURSORS = {"stream_results": True, "max_row_buffer": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "cursors": CURSORS,
    "row by row": {"yield_per": 1},
    "autocommit": CURSORS | {"isolation_level": "AUTOCOMMIT"},
    "others": {
        "no_parameters": True,
        "compiled_cache": None,
        "insertmanyvalues_page_size": 1,
        "preserve_rowcount": True,
        "driver_column_names": True,
        "logging_token": "shop",
        "isolation_level": "SERIALIZABLE",
    },
}
DRIVERS = ("postgresql+psycopg", "postgresql+psycopg2", "postgresql+pg8000", "mysql+pymysql", "sqlite+pysqlite")
ASYNC_DRIVERS = ("postgresql+asyncpg", "postgresql+psycopg")
needs_transactions = pytest.mark.parametrize("options", [name for name in OPTIONS if name != "autocommit"])


@pytest.fixture(scope="module")
def urls(database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, sa.URL]]:
    """URLs of databases with Notify's tables, by kind, made on first use."""
    with ExitStack() as stack:

        class Made(dict[str, sa.URL]):
            def __missing__(self, kind: str) -> sa.URL:
                place = tmp_path_factory.mktemp("options")
                url = stack.enter_context(empty_database(kind, database_urls, place))
                plain = make_engine(url)
                create_tables(plain)
                plain.dispose()
                self[kind] = sa.make_url(url)
                return self[kind]

        yield Made()


def url_of(driver: str, urls: Mapping[str, sa.URL]) -> sa.URL:
    kind, _, package = driver.partition("+")
    if package != "pysqlite":
        pytest.importorskip(package)
    return urls[kind].set(drivername=driver)


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DRIVERS)
def engine(request: pytest.FixtureRequest, options: str, urls: Mapping[str, sa.URL]) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url_of(request.param, urls), execution_options=OPTIONS[options])
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    yield engine
    engine.dispose()


def received(number: int, transaction: str) -> ReceivedMessage:
    return ReceivedMessage(f"{transaction}.{number}", "t", 0, number, b"", None, None, {}, 1, "")


def unknown_half(connection: sa.Connection) -> HalfMessage:
    """A half of this source whose transaction has no row."""
    with without_server_cursors(connection):
        return HalfMessage(new_id(), "g", "main", read_source(connection)[0], 1, ())


def rows_of(connection: sa.Connection, topic: str) -> int:
    query = sa.select(sa.func.count()).select_from(half_message).where(half_message.c.topic == topic)
    return connection.scalar(query) or 0


@needs_transactions
def test_a_producer_sends(engine: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    modes: list[Any] = ["half", "outbox", "auto"]
    for mode in modes:
        options: dict[str, Any] = {"mode": mode, "half_timeout": PATIENCE_SECONDS}
        with TransactionProducer(memory.url, group=unique, engine=engine, **options) as producer:
            with Session(engine) as session, session.begin():
                for number in range(3):
                    producer.send(session, Message(unique, f"{number}", key="k"))
    with engine.connect() as connection:
        assert rows_of(connection, unique) == 3 * len(modes)


def test_a_check_is_answered(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        half = unknown_half(connection)
    local = LocalTransactionCheck(engine)
    assert when_free(lambda: local.check(half)) is Outcome.ROLLBACK


@needs_transactions
def test_an_inbox_knows_what_took_effect(engine: sa.Engine, unique: str) -> None:
    inbox, transaction = Inbox(engine), new_id()
    inbox.check()
    calls: list[Any] = []

    def handle(messages: Any, session: Session) -> None:
        calls.append(messages)

    assert inbox.run(unique, received(0, transaction), handle)
    assert not inbox.run(unique, received(0, transaction), handle)
    assert inbox.run_batch(unique, [received(n, transaction) for n in range(1, 4)], handle) == 3
    assert inbox.run_batch(unique, [received(n, transaction) for n in range(5)], handle) == 1
    assert len(calls) == 3
    inbox.purge(DAY)


def test_rows_are_purged(engine: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    async def purge_all() -> None:
        http = Servers(memory.url, "transactions")
        of_a_producer = RowPurge(http, unique, engine, DAY, Sources())
        await of_a_producer.once()
        await of_a_producer.close()
        await http.aclose()
        await purge(engine, memory.url, older_than=DAY)

    asyncio.run(purge_all())
    purge_by_force(engine, older_than=DAY)
    assert "done" in counts(engine)


@needs_transactions
def test_tables_are_made(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        source = read_source(connection)[0]
    assert create_tables(engine) == source


@pytest.mark.parametrize("options", ["cursors", "row by row"])
@pytest.mark.parametrize("driver", ASYNC_DRIVERS)
def test_coroutines_do_all_this(
    driver: str, options: str, urls: Mapping[str, sa.URL], memory: InMemoryServer, unique: str
) -> None:
    async def everything() -> None:
        engine = create_async_engine(url_of(driver, urls), execution_options=OPTIONS[options])
        producing: dict[str, Any] = {"group": unique, "engine": engine, "half_timeout": PATIENCE_SECONDS}
        async with AsyncTransactionProducer(memory.url, **producing) as producer:
            async with AsyncSession(engine) as session, session.begin():
                await producer.send(session, Message(unique, "x"))
        async with engine.connect() as connection:
            assert await connection.run_sync(rows_of, unique) == 1
            half = await connection.run_sync(unknown_half)
        async with engine.connect() as connection:
            assert await connection.run_sync(answer, half) is Outcome.ROLLBACK
        inbox, transaction = Inbox(engine), new_id()
        await inbox.check_async()

        async def handle(messages: Any, session: AsyncSession) -> None:
            pass

        batch = [received(n, transaction) for n in range(3)]
        assert await inbox.run_async(unique, batch[0], handle)
        assert await inbox.run_batch_async(unique, batch, handle) == 2
        await inbox.purge_async(DAY)
        http = Servers(memory.url, "transactions")
        of_a_producer = RowPurge(http, unique, engine, DAY, Sources())
        await of_a_producer.once()
        await of_a_producer.close()
        await http.aclose()
        await engine.dispose()

    asyncio.run(everything())
