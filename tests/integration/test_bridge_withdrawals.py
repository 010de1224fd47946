"""Withdrawals of delayed messages, end to end: over each bridge, and over servers that store halves in a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from notify.client import TransactionProducer, create_tables
from notify.movers.relay.relay import Relay
from notify.storage.sql.engines import opened
from notify.testing.process import ServerProcess
from tests.support.bridges import move
from tests.support.databases import empty_database
from tests.support.groups import subscribe
from tests.support.servers import Started, make_storage, stop_if_running, until_known
from tests.support.shop import make_engine
from tests.support.withdrawals import check_delivered, withdraw_some


def over_a_bridge(url: str, server: ServerProcess, name: str, **options: Any) -> None:
    subscribe(server.url, name, name)
    engine = make_engine(url)
    create_tables(engine)
    move(url, server)  # what is only in PostgreSQL's log is read from the bridge's first run on
    with TransactionProducer(server.url, group=name, engine=engine, mode="outbox", **options) as producer:
        withdrawn = withdraw_some(producer, engine, name, lambda: move(url, server))
    engine.dispose()
    check_delivered(server.url, name, name, withdrawn)


def test_over_the_bridge_of_a_binlog(binlog_url: str, server: ServerProcess, unique: str) -> None:
    over_a_bridge(binlog_url, server, unique)


@pytest.mark.parametrize("rows", [True, pytest.param(False, marks=pytest.mark.long)])
def test_over_the_bridge_of_postgresql(wal_url: str, server: ServerProcess, unique: str, rows: bool) -> None:
    over_a_bridge(wal_url, server, unique, rows=rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["postgresql", pytest.param("sqlite", marks=pytest.mark.long)])
def test_over_sql_storage_and_a_relay(kind: str, database_urls: Mapping[str, str], tmp_path: Path, unique: str) -> None:
    with empty_database(kind, database_urls, tmp_path) as storage, opened(storage) as stored:

        def relayed(queue_url: str) -> None:
            asyncio.run(Relay(stored, queue_url).run(once=True))

        _over_sql_storage(storage, tmp_path, unique, relayed)


def _over_sql_storage(storage: str, directory: Path, name: str, move: Callable[[str], None]) -> None:
    """A producer sends halves to a server of SQL storage. The registry names the one with the queues, which tells the
    outcomes."""
    make_storage(storage)
    with ExitStack() as stack:
        halves = Started(storage, directory, stack).add()
        queue = ServerProcess(directory / "queue", flags=["--registry", storage, "--roles", "queue"]).start()
        stack.callback(stop_if_running, queue)
        until_known([halves, queue])
        subscribe(queue.url, name, name)
        engine = make_engine(f"sqlite:///{directory}/service.db")
        stack.callback(engine.dispose)
        create_tables(engine)
        with closing(TransactionProducer(halves.url, group=name, engine=engine)) as producer:
            withdrawn = withdraw_some(producer, engine, name, lambda: move(queue.url))
        check_delivered(queue.url, name, name, withdrawn)
