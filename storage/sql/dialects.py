"""Calls of a database's driver on the hot path: rows in, outcomes in. One class a database, same answers.

SQLAlchemy's compiler costs more than the database does per row here, so these few statements are written out.
Measured, 256 B, one connection, 256 rows a statement, rows/s: see docs/performance.md.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.engine.url import URL

from notify.databases import WAKE_CHANNEL, use_explicit_begin
from notify.errors import InvalidRequest
from notify.storage.sql.rows import COLUMNS, FIXED, Row

TABLE = "server_half_message"
STATEMENT_BYTES = 2 << 20
"""The most bytes of bodies in one statement: twice as many characters, well below MariaDB's max_allowed_packet of
16 MiB."""
STATEMENT_ROWS = 1000
IDS_A_STATEMENT = 200
CONNECT_SECONDS = 3
WAKE_SECONDS = 0.02
"""How often relays are woken at most."""
IO_SECONDS = 10
"""How long a statement may take before its connection is taken for dead."""


class Duplicate(Exception):
    """A row is there already; the transaction is to be rolled back."""


class Again(Exception):
    """A deadlock or a lock that was not granted in time: the same again may succeed."""


class Gone(Exception):
    """The connection is lost. Whether a commit under way happened is not known."""


class Dialect(Protocol):
    """The statements of one kind of database, on a connection of its driver."""

    def connect(self) -> Any: ...

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        """Raises Duplicate where one of them is there already."""
        ...

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        """Set the outcome of what is undecided among these; how many rows that were."""
        ...

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        """(id, state, producer group, token) of those that are there; locked until the end."""
        ...

    def commit(self, connection: Any) -> None: ...

    def rollback(self, connection: Any) -> None: ...

    def error(self, error: Exception) -> Exception:
        """The meaning of a driver's error: Duplicate, Again, Gone, or itself."""
        ...


def chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Rows by statement: bounded in number and in bytes."""
    first, size = 0, 0
    for i, row in enumerate(rows):
        size += len(row.body) + len(row.headers or "") + 256
        if i > first and (size > STATEMENT_BYTES or i - first >= STATEMENT_ROWS):
            yield rows[first:i]
            first, size = i, len(row.body) + 256
    yield rows[first:]


def by_ids(names: Sequence[str]) -> Iterator[str]:
    """Ids as the inside of IN (…), a few hundred at a time and sorted: locks are taken in one order."""
    ordered = iter(sorted(names))
    while some := list(itertools.islice(ordered, IDS_A_STATEMENT)):
        yield "'" + "','".join(some) + "'"


_LOCK = (
    "SELECT transaction_id, state, producer_group, token FROM " + TABLE + " WHERE transaction_id IN ({}) AND "
    "message_no = 0"
)
_DECIDE = (
    "UPDATE " + TABLE + " SET state = '{state}', decided_at = '{at}', next_check_us = NULL "
    "WHERE transaction_id IN ({ids}) AND state IN ('PREPARED', 'PARKED')"
)


class _Statements:
    """Base of the three dialects: text through a cursor."""

    for_update = " FOR UPDATE"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        changed = 0
        with connection.cursor() as cursor:
            for inside in by_ids(names):
                cursor.execute(_DECIDE.format(state=state, at=at, ids=inside))
                changed += cursor.rowcount
        return changed

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        found: list[tuple[str, str, str, int]] = []
        with connection.cursor() as cursor:
            for inside in by_ids(names):
                cursor.execute(_LOCK.format(inside) + self.for_update)
                found += cursor.fetchall()
        return found

    def commit(self, connection: Any) -> None:
        connection.commit()

    def rollback(self, connection: Any) -> None:
        connection.rollback()


class MySql(_Statements):
    """MySQL and MariaDB through PyMySQL."""

    def connect(self) -> Any:
        connection = _detached(self._engine)
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.query("SET SESSION innodb_lock_wait_timeout = 2")
        return connection

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        for some in chunks(rows):
            connection.query(_MYSQL_INSERT + ",".join([_mysql_row(row) for row in some]))

    def error(self, error: Exception) -> Exception:
        code = error.args[0] if error.args else None
        if code == 1062:
            return Duplicate()
        if code in (1205, 1213, 1020):
            return Again(str(error))
        if code in (2006, 2013, 2003, 1053, 1927, 1290, 1792, 1836, 4031, 0, 1040, 1203) or isinstance(error, OSError):
            return Gone(str(error))
        return error


_FIXED_COLUMNS = list(FIXED)
_FIXED_VALUES = ",".join(str(v) if isinstance(v, int) else f"'{v}'" for v in FIXED.values())
_MYSQL_INSERT = f"INSERT INTO {TABLE} ({','.join(f'`{c}`' for c in (*COLUMNS, *_FIXED_COLUMNS))}) VALUES "


def _quoted(text: str | None) -> str:
    """A text as a literal. What could end one early, or is not ASCII, goes as hexadecimal digits."""
    if text is None:
        return "NULL"
    if text.isascii() and "'" not in text and "\\" not in text:
        return f"'{text}'"
    return f"_utf8mb4 x'{text.encode().hex()}'"


def _number(value: float | None) -> str:
    return "NULL" if value is None else repr(value)


def _mysql_row(r: Row) -> str:
    return (
        f"('{r.transaction_id}',{r.message_no},{_quoted(r.producer_group)},'{r.state}',{_quoted(r.topic)},"
        f"{_quoted(r.key)},{_quoted(r.tag)},{_quoted(r.headers)},x'{r.body.hex()}',{_number(r.delay)},"
        f"{_quoted(r.deliver_at)},{_number(r.ttl)},'{r.created_at}',{_quoted(r.source)},{_quoted(r.instance)},"
        f"{_number(r.next_check_us)},{_quoted(r.decided_at)},{_FIXED_VALUES})"
    )


class PostgreSql(_Statements):
    """PostgreSQL through psycopg: rows by COPY."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._woke = 0.0

    def connect(self) -> Any:
        return _detached(self._engine)

    def commit(self, connection: Any) -> None:
        connection.commit()
        if time.monotonic() - self._woke > WAKE_SECONDS:
            # Behind the commit, not within: transactions that notify commit one after the other.
            self._woke = time.monotonic()
            connection.execute(f"NOTIFY {WAKE_CHANNEL}")
            connection.commit()

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        with connection.cursor() as cursor:
            with cursor.copy(_COPY) as copy:
                for some in chunks(rows):
                    copy.write("".join([_copy_row(row) for row in some]))

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        # Prepared, so that the plan is made once and for few ids: a list of literals is planned each time, and now and
        # then as a scan of the whole table (p90 5.3 ms instead of 1.4).
        with connection.cursor() as cursor:
            cursor.execute(_PREPARED_DECIDE, (state, at, sorted(names)), prepare=True)
            return int(cursor.rowcount)

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        with connection.cursor() as cursor:
            cursor.execute(_PREPARED_LOCK, (sorted(names),), prepare=True)
            found: list[tuple[str, str, str, int]] = cursor.fetchall()
            return found

    def error(self, error: Exception) -> Exception:
        state = getattr(error, "sqlstate", None)
        if state == "23505":
            return Duplicate()
        if state in ("40001", "40P01", "55P03", "57014"):
            return Again(str(error))
        if state is None or state.startswith(("08", "57P", "53", "25006")):
            return Gone(str(error)) if isinstance(error, _operational()) else error
        return error


def _operational() -> tuple[type[Exception], ...]:
    import psycopg

    return (psycopg.OperationalError, psycopg.InterfaceError, OSError)


_QUOTED_COLUMNS = ",".join([f'"{c}"' for c in (*COLUMNS, *_FIXED_COLUMNS)])
_COPY = f"COPY {TABLE} ({_QUOTED_COLUMNS}) FROM STDIN"
_ANY = "= ANY(%s::text[])"
_PREPARED_DECIDE = _DECIDE.replace("'{state}'", "%s").replace("'{at}'", "%s::timestamp").replace("IN ({ids})", _ANY)
_PREPARED_LOCK = _LOCK.replace("IN ({})", _ANY) + " ORDER BY transaction_id FOR UPDATE"
_COPY_FIXED = "\t".join(str(v) for v in FIXED.values())
_COPY_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copied(text: str | None) -> str:
    if text is None:
        return "\\N"
    return text.translate(_COPY_ESCAPES) if not text.isalnum() else text


def _copy_number(value: float | None) -> str:
    return "\\N" if value is None else repr(value)


def _copy_row(r: Row) -> str:
    return (
        f"{r.transaction_id}\t{r.message_no}\t{_copied(r.producer_group)}\t{r.state}\t{_copied(r.topic)}\t"
        f"{_copied(r.key)}\t{_copied(r.tag)}\t{_copied(r.headers)}\t\\\\x{r.body.hex()}\t{_copy_number(r.delay)}\t"
        f"{_copied(r.deliver_at)}\t{_copy_number(r.ttl)}\t{r.created_at}\t{_copied(r.source)}\t"
        f"{_copied(r.instance)}\t{_copy_number(r.next_check_us)}\t{_copied(r.decided_at)}\t{_COPY_FIXED}\n"
    )


class Sqlite(_Statements):
    """SQLite: one writer at a time, by its own lock."""

    for_update = ""

    def connect(self) -> Any:
        return _SqliteConnection(_detached(self._engine))

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        connection.begin()
        with connection.cursor() as cursor:
            cursor.executemany(_SQLITE_INSERT, rows)

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        connection.begin()
        return super().decide(connection, names, state, at)

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        connection.begin()
        return super().lock(connection, names)

    def error(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.IntegrityError):
            return Duplicate()
        if isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error)):
            return Again(str(error))
        return error


_SQLITE_INSERT = f"INSERT INTO {TABLE} ({_QUOTED_COLUMNS}) VALUES ({','.join('?' * len(COLUMNS))},{_FIXED_VALUES})"


class _SqliteConnection:
    """sqlite3's connection with explicit BEGIN IMMEDIATE, and cursors that close."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._began = False

    def begin(self) -> None:
        if not self._began:
            self._real.execute("BEGIN IMMEDIATE")
            self._began = True

    def cursor(self) -> Any:
        return contextlib.closing(self._real.cursor())

    def commit(self) -> None:
        if self._began:
            self._real.execute("COMMIT")
        self._began = False

    def rollback(self) -> None:
        if self._began:
            self._real.execute("ROLLBACK")
        self._began = False

    def close(self) -> None:
        self._real.close()


def open_engine(url: str, *, pooled: bool = True) -> Engine:
    """An engine for a database of the server; not `pooled`: a connection is closed with its use.

    Raises InvalidRequest with what is wrong with the URL.
    """
    try:
        parsed = with_driver(sa.make_url(url))
        pool: dict[str, Any] = {"pool_size": 8, "max_overflow": 8} if pooled else {"poolclass": sa.NullPool}
        engine = sa.create_engine(parsed, connect_args=_arguments(parsed), **pool)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
        raise InvalidRequest(f"--storage {_shown(url)}: {error}") from None
    if engine.dialect.name not in ("sqlite", "postgresql", "mysql", "mariadb"):
        raise InvalidRequest(f"--storage: {engine.dialect.name} is not served; PostgreSQL, MySQL, MariaDB, SQLite are")
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
        return engine
    # A waiting UPDATE then sees what the one before it wrote, and locks no gaps, whatever the database's default is.
    return engine.execution_options(isolation_level="READ COMMITTED")


@contextlib.contextmanager
def opened(url: str) -> Iterator[Engine]:
    """An engine for a while: its connections are closed at the end. Raises what `open_engine` raises."""
    engine = open_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


def _detached(engine: Engine) -> Any:
    """A driver's connection for one owner, out of the pool's hands."""
    pooled = engine.raw_connection()
    connection = pooled.driver_connection
    pooled.detach()
    return connection


def with_driver(url: URL) -> URL:
    """`mysql://` and `postgresql://` with the drivers that are installed with this package."""
    drivers = {"mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql", "postgresql": "postgresql+psycopg"}
    drivers["postgres"] = drivers["postgresql"]
    return url.set(drivername=drivers.get(url.drivername, url.drivername))


def _arguments(url: URL) -> dict[str, Any]:
    name = url.get_backend_name()
    if name in ("mysql", "mariadb"):
        return {"connect_timeout": CONNECT_SECONDS, "read_timeout": IO_SECONDS, "write_timeout": IO_SECONDS}
    if name == "postgresql":
        return {
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": IO_SECONDS * 1000,
            "options": f"-c statement_timeout={IO_SECONDS * 1000} -c lock_timeout=2000 "
            "-c default_transaction_isolation=read\\ committed",
        }
    if name == "sqlite":
        return {"timeout": 2, "check_same_thread": False}
    return {}


def _shown(url: str) -> str:
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return "(not a URL)"


def dialect_of(engine: Engine) -> Any:
    kinds = {"postgresql": PostgreSql, "sqlite": Sqlite}
    return kinds.get(engine.dialect.name, MySql)(engine)
