"""Every bridge moves what its source commits to every sink, once and in order: the logs of MariaDB, MySQL and
PostgreSQL, to queue servers and Kafka."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Superseded
from notify.client import create_tables
from notify.client.tables.definitions import notify_refused
from notify.testing.binlog_server import BinlogServer
from tests.support.bridges import poison
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.databases import empty_binlog
from tests.support.targets import Target
from tests.support.wal import insert


class Source:
    """A database with an outbox, and what a bridge moves from it."""

    def __init__(self, url: str, target: Target) -> None:
        self.url = url
        self.engine = sa.create_engine(url)
        create_tables(self.engine)
        self._target = target
        self.move()  # what PostgreSQL commits before its bridge's first run is taken from the tables

    def write(self, *numbers: int, **values: object) -> None:
        """A transaction for each number."""
        for n in numbers:
            with self.engine.begin() as connection:
                insert(connection, self._target.topic, n, **values)

    def move(self) -> Bridge:
        """Run a bridge until everything is moved."""
        bridge = Bridge([self.url], self._target.url)
        asyncio.run(asyncio.wait_for(bridge.run(once=True), PATIENCE_SECONDS))
        return bridge

    @asynccontextmanager
    async def moving(self, url: str) -> AsyncIterator[tuple[Bridge, asyncio.Task[object]]]:
        """A bridge that runs, and its task; `url`: the target's."""
        bridge = Bridge([self.url], url)
        task = asyncio.get_running_loop().create_task(bridge.run())
        try:
            await eventually_async(lambda: task.done() or bridge.totals.connections, "the bridge to read")
            yield bridge, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(params=["mariadb", pytest.param("mysql", marks=pytest.mark.long), "postgresql"])
def source(
    request: pytest.FixtureRequest, binlog_servers: Callable[[str], BinlogServer], target: Target
) -> Iterator[Source]:
    if request.param == "postgresql":
        made = Source(request.getfixturevalue("wal_url"), target)
        yield made
        made.engine.dispose()
        return
    with empty_binlog(binlog_servers(request.param)) as url:
        made = Source(url, target)
        yield made
        made.engine.dispose()


def body(n: int) -> str:
    return json.dumps({"n": n})


def test_commits_arrive_once_in_commit_order(source: Source, target: Target) -> None:
    with source.engine.connect() as late, source.engine.connect() as undone:
        insert(late, target.topic, 100)
        insert(undone, target.topic, -1)
        source.write(*range(5))
        undone.rollback()
        late.commit()
    source.write(*range(5, 10))
    assert source.move().totals.rows == 11
    source.write(10)
    assert source.move().totals.rows == 1
    assert source.move().totals.rows == 0
    assert target.delivered(12) == [body(n) for n in (*range(5), 100, *range(5, 11))]


@pytest.mark.long
@pytest.mark.parametrize("answer", [False, True], ids=["before the answer", "after it was stored"])
def test_a_batch_whose_connection_is_cut_is_there_once(source: Source, target: Target, answer: bool) -> None:
    source.write(0)
    source.move()

    async def run() -> None:
        async with source.moving(target.proxied()) as (bridge, _):
            source.write(1)
            await eventually_async(lambda: bridge.totals.rows, "the first row to be moved")
            was_cut = target.cut(answer=answer)
            source.write(2, body=b"second of two")
            await eventually_async(was_cut, "the connection to be cut")
            source.write(3)
            assert await asyncio.to_thread(target.delivered, 4) == [body(0), body(1), "second of two", body(3)]

    asyncio.run(run())


@pytest.mark.long
def test_a_large_transaction_is_there_as_a_whole_without_what_was_taken_back(source: Source, target: Target) -> None:
    with source.engine.begin() as connection:
        for n in range(6):
            insert(connection, target.topic, n, body=f"{n} {'x' * 900_000}".encode())
        part = connection.begin_nested()
        for n in range(6, 12):
            insert(connection, target.topic, n, body=f"{n} {'x' * 900_000}".encode())
        part.rollback()
    source.write(12, body=b"12 is behind it")
    assert source.move().totals.rows >= 7
    assert [text.split()[0] for text in target.delivered(7)] == ["0", "1", "2", "3", "4", "5", "12"]


@pytest.mark.long
def test_refused_transactions_are_listed_and_the_others_arrive(source: Source, target: Target) -> None:
    source.write(0)
    refused = poison(source.engine)
    source.write(1)
    bridge = source.move()
    assert (bridge.totals.rows, bridge.totals.refused) == (2, 1)
    with source.engine.connect() as connection:
        assert connection.scalars(sa.select(notify_refused.c.transaction_id)).all() == [refused]
    assert target.delivered(2) == [body(0), body(1)]


@pytest.mark.long
def test_a_second_bridge_takes_over_and_the_first_ends(source: Source, target: Target) -> None:
    async def run() -> None:
        async with source.moving(target.url) as (first, superseded):
            source.write(0)
            await eventually_async(lambda: first.totals.rows, "the first bridge to move a row")
            async with source.moving(target.url) as (second, _):
                source.write(1)
                with pytest.raises(Superseded):
                    await asyncio.wait_for(superseded, PATIENCE_SECONDS)
                await eventually_async(lambda: second.totals.rows, "the second bridge to move a row")

    asyncio.run(run())
    source.write(2)
    source.move()
    assert target.delivered(3) == [body(n) for n in range(3)]
