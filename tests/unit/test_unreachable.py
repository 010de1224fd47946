"""Which errors say that a database does not answer now, whatever classes their drivers give them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import django.db
import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi

from notify.client.django import DjangoInbox
from notify.runtime.databases import is_away


def wrapped(error: Any, dbapi: Any) -> Any:
    return sa.exc.DBAPIError.instance("SELECT 1", None, error, dbapi.Error)


def of_asyncpg(error: Any) -> Any:
    """As SQLAlchemy's adapter translates an error for which it has no class."""
    make: Any = AsyncAdapt_asyncpg_dbapi
    adapter = make(asyncpg)
    translated = adapter.Error(str(error))
    translated.pgcode = translated.sqlstate = error.sqlstate
    return wrapped(translated, adapter)


def of_mysql(code: int) -> Any:
    """As PyMySQL raises it."""
    with pytest.raises(pymysql.MySQLError) as raised:
        pymysql.err.raise_mysql_exception(b"\xff" + code.to_bytes(2, "little") + b"#HY000text")
    return wrapped(raised.value, pymysql.err)


AWAY = [
    ConnectionRefusedError("asyncio"),
    TimeoutError(),
    sa.exc.TimeoutError("the pool"),
    of_asyncpg(asyncpg.AdminShutdownError("57P01")),
    of_asyncpg(asyncpg.CannotConnectNowError("57P03")),
    of_asyncpg(asyncpg.TooManyConnectionsError("53300")),
    of_asyncpg(asyncpg.ConnectionDoesNotExistError("08003")),
    of_asyncpg(asyncpg.LockNotAvailableError("55P03")),
    asyncpg.CannotConnectNowError("of a connect"),
    wrapped(psycopg.errors.ReadOnlySqlTransaction("after a failover"), psycopg),
    wrapped(psycopg.errors.DeadlockDetected("a deadlock"), psycopg),
    wrapped(psycopg.OperationalError("connection refused"), psycopg),
    wrapped(psycopg.errors.ConnectionTimeout("connection timeout expired"), psycopg),
    *map(of_mysql, (1040, 1045, 1203, 1205, 1213, 1290, 4031)),
    *[wrapped(pymysql.OperationalError(code, "text"), pymysql.err) for code in (2002, 2003, 2006, 2013)],
    wrapped(pymysql.InterfaceError(0, ""), pymysql.err),
]
HERE = [
    ValueError("no error of a database"),
    KeyError(1205),
    of_asyncpg(asyncpg.UndefinedColumnError("42703")),
    of_asyncpg(asyncpg.RaiseError("P0001")),
    wrapped(psycopg.errors.InsufficientPrivilege("42501"), psycopg),
    wrapped(psycopg.errors.CheckViolation("23514"), psycopg),
    *map(of_mysql, (1054, 1142, 1364, 1644, 3819, 4025)),
]


@pytest.mark.parametrize("error", AWAY, ids=str)
def test_a_database_is_away(error: Any) -> None:
    assert is_away(error)


@pytest.mark.parametrize("error", HERE, ids=str)
def test_a_database_that_refuses_is_not_away(error: Any) -> None:
    """Most of PyMySQL's are OperationalErrors: a message waited for ever for a right that nobody granted."""
    assert not is_away(error)


@pytest.mark.parametrize("error", [*AWAY, *HERE], ids=str)
def test_django_has_the_same_errors(error: Any) -> None:
    inbox = object.__new__(DjangoInbox)
    assert inbox.is_away(error) == is_away(error)
    if isinstance(error, sa.exc.DBAPIError):
        of_django = django.db.OperationalError(str(error.orig))
        of_django.__cause__ = error.orig
        assert inbox.is_away(of_django) == is_away(error)


def test_sqlite_is_away_only_while_its_file_is_locked_or_cannot_be_opened(tmp_path: Path) -> None:
    def raised(path: str, statement: str) -> sa.exc.OperationalError:
        engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0})
        with pytest.raises(sa.exc.OperationalError) as error, engine.connect() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()
        return error.value

    path = f"{tmp_path}/shop.db"
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("CREATE TABLE orders (id)")
        assert not is_away(raised(path, "SELECT * FROM nowhere"))
        assert not is_away(raised(path, "SELECT nothing FROM orders"))
        assert not is_away(raised(f"file:{path}?mode=ro&uri=true", "INSERT INTO orders VALUES (1)"))
        writer.execute("BEGIN IMMEDIATE")
        assert is_away(raised(path, "INSERT INTO orders VALUES (1)"))
        writer.execute("ROLLBACK")
    writer.close()
    assert is_away(raised(f"{tmp_path}/no/directory/shop.db", "SELECT 1"))
