"""A service whose pool gives no connection, because its lock or all of its connections are taken: its checks are
answered all the same, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from notify.client import AsyncTransactionProducer, Message, TransactionProducer, use_explicit_begin
from notify.client.tables.background_connections import OWN, BackgroundConnections, note_connected
from notify.client.tables.database_calls import DatabaseCalls
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.dying import lose_outcomes
from tests.support.shop import Order, make_async_engine, make_engine

PAST_THE_FIRST_CHECK = 60.0
"""Seconds; without `check_after` the first check comes after 5."""
SOON = 0.05
"""Seconds that background work waits for a pool which gives nothing."""


@pytest.fixture
def engine(emptied_shop: sa.Engine) -> Iterator[sa.Engine]:
    """A service's engine, with a pool for this test alone."""
    made = make_engine(emptied_shop.url.render_as_string(hide_password=False))
    with made.connect() as connection:
        note_connected(connection)
    yield made
    end(made)


def end(engine: sa.Engine) -> None:
    """Close all connections, also those that come to threads which still wait for them."""
    eventually(lambda: all(thread.name != "notify-connection" for thread in threading.enumerate()))
    engine.dispose()


@contextmanager
def lock_taken(engine: sa.Engine) -> Iterator[None]:
    """Another thread holds the lock of the engine's pool, as the main thread does after an exception at its worst."""
    pool: Any = engine.pool
    is_taken, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._pool.mutex:
            is_taken.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_taken.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        may_end.set()
        holder.join()


@contextmanager
def all_taken(engine: sa.Engine) -> Iterator[None]:
    """The service's transactions have all connections of its pool."""
    assert isinstance(engine.pool, sa.QueuePool)
    with engine.connect():
        assert engine.pool.checkedout() == engine.pool.size()
        yield


def of_one_connection(engine: sa.Engine, **options: Any) -> sa.Engine:
    small = sa.create_engine(engine.url, pool_size=1, max_overflow=0, **options)
    if small.dialect.name == "sqlite":
        use_explicit_begin(small)
    with small.connect() as connection:
        note_connected(connection)
    return small


def opened(engine: sa.Engine) -> Callable[[], int]:
    """How many connections are open; now they are all in the pool."""
    assert isinstance(engine.pool, sa.QueuePool)
    count = [engine.pool.checkedin()]
    sa.event.listen(engine, "connect", lambda *_: count.append(1))
    sa.event.listen(engine, "close", lambda *_: count.append(-1))
    return lambda: sum(count)


def in_doubt(engine: sa.Engine, producer: TransactionProducer, topic: str) -> None:
    """A committed transaction whose outcome has not reached the server."""
    lose_outcomes(producer)
    with Session(engine) as session, session.begin():
        session.add(Order(item="x"))
        producer.send(session, Message(topic, "x"))


def test_checks_are_answered_while_the_pools_lock_is_taken(
    engine: sa.Engine, memory: InMemoryServer, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of a signal handler, such as Celery's soft time limit, may leave it so for ever."""
    are_open, pool = opened(engine), engine.pool
    assert isinstance(pool, sa.QueuePool)
    with closing(TransactionProducer(memory.url, group=unique, engine=engine)) as producer:
        in_doubt(engine, producer, unique)
        with lock_taken(engine), caplog.at_level(logging.WARNING, "notify.client"):
            memory.advance(PAST_THE_FIRST_CHECK)
            eventually(lambda: not memory.halves(unique), "the answer to the check")
        eventually(lambda: are_open() == pool.checkedin(), "the end of the connections of one's own")
    assert [m.text for m in memory.messages(unique)] == ["x"]
    assert "make connections of their own" in caplog.text


def test_checks_are_answered_while_the_service_has_all_connections(
    engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    small = of_one_connection(engine)
    with closing(TransactionProducer(memory.url, group=unique, engine=small)) as producer:
        in_doubt(small, producer, unique)
        with all_taken(small):
            memory.advance(PAST_THE_FIRST_CHECK)
            eventually(lambda: not memory.halves(unique), "the answer to the check")
    end(small)
    assert [m.text for m in memory.messages(unique)] == ["x"]


def test_checks_of_coroutines_are_answered_while_the_service_has_all_connections(
    engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    async def scenario() -> None:
        small = make_async_engine(engine.url, pool_size=1, max_overflow=0)
        producer = AsyncTransactionProducer(memory.url, group=unique, engine=small)
        producer.outgoing.outcome_soon = lambda *_: None  # type: ignore[method-assign]
        async with producer:
            async with AsyncSession(small) as session, session.begin():
                await producer.send(session, Message(unique, "x"))
            async with small.connect():
                memory.advance(PAST_THE_FIRST_CHECK)
                await eventually_async(lambda: not memory.halves(unique), "the answer to the check")
            pool: Any = small.sync_engine.pool
            await eventually_async(lambda: not pool.checkedout(), "the return of the connection that came too late")
        await small.dispose()

    asyncio.run(scenario())
    assert [m.text for m in memory.messages(unique)] == ["x"]


def test_other_background_work_goes_on_while_the_pools_lock_is_taken(engine: sa.Engine) -> None:
    """It is purges, and what was left behind."""

    async def work() -> Any:
        calls = DatabaseCalls(engine, pool_seconds=SOON)
        found = await calls.call(lambda connection: connection.scalar(sa.text("SELECT 7")), schema="")
        await calls.close()
        return found

    with lock_taken(engine):
        assert asyncio.run(work()) == 7


def test_a_lock_that_is_taken_while_a_connection_is_in_use(engine: sa.Engine) -> None:
    """Returning the connection waits for the lock, too."""
    connections, pool = BackgroundConnections(engine, SOON), engine.pool
    assert isinstance(pool, sa.QueuePool)
    with ExitStack() as until_here:
        with connections.one() as connection:
            assert connection.engine is engine
            until_here.enter_context(lock_taken(engine))
        with connections.one() as connection:
            assert connection.engine is not engine
            assert connection.scalar(sa.text("SELECT 1")) == 1
    eventually(lambda: engine_of_one(connections) is engine, "the end of the one that waited")
    assert not pool.checkedout()


def test_a_connection_of_ones_own_is_like_the_services(engine: sa.Engine) -> None:
    """It has the engine's options and listeners, such as one that gives each new connection a fresh password."""
    passwords: list[str] = []
    statements: list[str] = []
    small = of_one_connection(engine).execution_options(schema_translate_map={None: "here"}, mine=1)
    sa.event.listen(small, "do_connect", lambda *_: passwords.append("fresh"))
    sa.event.listen(small, "before_cursor_execute", lambda *given: statements.append(given[2]))
    are_open = opened(small)
    with all_taken(small):
        known = len(passwords)
        with BackgroundConnections(small, SOON).one() as connection:
            assert connection.get_execution_options() == small.get_execution_options()
            connection.exec_driver_sql("SELECT 8")
            assert are_open() == 2
        assert are_open() == 1 and len(passwords) == known + 1 and "SELECT 8" in statements
    end(small)


def test_connections_of_ones_own_are_few(engine: sa.Engine) -> None:
    small = of_one_connection(engine)
    connections = BackgroundConnections(small, SOON)
    with all_taken(small), ExitStack() as until_here:
        for _ in range(OWN):
            until_here.enter_context(connections.one())
        with pytest.raises(sa.exc.TimeoutError, match="in use already"), connections.one():
            raise AssertionError("there was another one")
    eventually(lambda: engine_of_one(connections) is small, "the end of the one that waited")
    end(small)


def test_a_pool_that_has_given_nothing_yet_is_waited_for(engine: sa.Engine) -> None:
    """Only its own first connection finds out, while others wait, what the server is."""
    fresh = make_engine(engine.url.render_as_string(hide_password=False))
    with ThreadPoolExecutor(1) as threads:
        with lock_taken(fresh):
            connected = threads.submit(engine_of_one, BackgroundConnections(fresh, SOON))
            with pytest.raises(TimeoutError):
                connected.result(5 * SOON)  # that nothing happens is what this waits for
        assert connected.result(PATIENCE_SECONDS) is fresh
    end(fresh)


def engine_of_one(connections: BackgroundConnections) -> sa.Engine:
    with connections.one() as connection:
        return connection.engine


def test_a_lock_that_stays_taken_is_told_with_its_remedy(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """A pool without a free connection raises after its timeout; one whose lock stays taken says nothing for ever."""
    small = of_one_connection(engine, pool_timeout=SOON)
    connections = BackgroundConnections(small, SOON)

    def told() -> bool:
        engine_of_one(connections)
        return "dispose(close=False)" in caplog.text

    with lock_taken(small), caplog.at_level(logging.WARNING, "notify.client"):
        eventually(told)
        told()
        assert caplog.text.count("dispose(close=False)") == caplog.text.count("make connections of their own") == 1
        former = small.pool
        small.dispose(close=False)
        assert engine_of_one(connections) is small
    end(small)
    former.dispose()
