"""SQLite's transactions begin with BEGIN IMMEDIATE, and only where there is a transaction to begin."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from notify.client import create_tables, use_explicit_begin
from notify.client.tables.definitions import half_message, notify_source
from notify.spark.inputs.databases import Database

INSERT = sa.text("INSERT INTO item VALUES ('a')")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with an empty table `item`."""
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE item (name TEXT)")
    connection.close()
    return tmp_path / "shop.db"


@pytest.fixture
def busy(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that holds the writer's lock."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def names(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    found = [str(row[0]) for row in connection.execute("SELECT name FROM item")]
    connection.close()
    return found


@pytest.mark.parametrize("options_of", ["engine", "create_engine", "connection"])
def test_a_statement_in_autocommit_stands_without_a_commit(path: Path, options_of: str) -> None:
    """A transaction that nobody asked for would be rolled back as the connection is closed."""
    arguments = {"isolation_level": "AUTOCOMMIT"} if options_of == "create_engine" else {}
    engine = sa.create_engine(f"sqlite:///{path}", **arguments)  # type: ignore[call-overload]
    use_explicit_begin(engine)
    options = {} if options_of == "create_engine" else {"isolation_level": "AUTOCOMMIT"}
    opened = engine.execution_options(**options).connect() if options_of == "engine" else engine.connect()
    with opened.execution_options(**options) as connection:
        connection.execute(INSERT)
    assert names(path) == ["a"]
    engine.dispose()


async def test_an_asynchronous_statement_in_autocommit_stands_without_a_commit(path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    use_explicit_begin(engine)
    async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        await connection.execute(INSERT)
    await engine.dispose()
    assert names(path) == ["a"]


def test_a_connection_that_was_in_autocommit_begins_transactions_again(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}", pool_size=1, max_overflow=0)
    use_explicit_begin(engine)
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(INSERT)
    with engine.connect() as connection:
        with connection.begin_nested():  # without BEGIN its release would be a commit
            connection.execute(INSERT)
        connection.rollback()
    assert names(path) == ["a"]
    engine.dispose()


def test_an_audit_reads_a_database_whose_lock_a_writer_holds(path: Path, busy: sqlite3.Connection) -> None:
    busy.execute("ROLLBACK")
    engine = sa.create_engine(f"sqlite:///{path}")
    create_tables(engine)
    engine.dispose()
    busy.execute("BEGIN IMMEDIATE")
    database = Database(f"sqlite:///{path}")
    assert database.source_id()
    assert database.purged() == (0, 0)
    assert not database.has_rows(half_message)
    assert database.rows_of(["none"]) == []
    with database.reading() as connection:
        assert connection.execute(sa.select(notify_source.c.id)).all()
    database.close()


def test_an_audit_holds_no_lock_while_it_reads(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    with database.reading() as connection:
        connection.exec_driver_sql("SELECT count(*) FROM item")
        writer = sqlite3.connect(path, timeout=0)
        writer.execute("BEGIN IMMEDIATE")
        writer.close()
    database.close()
