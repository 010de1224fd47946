"""Differences between databases for client and server: column types, the clock, and how SQLite begins."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from notify.errors import InvalidRequest
from notify.urls import without_secrets

T = TypeVar("T")
_ASCII = {"charset": "ascii", "collation": "ascii_bin"}
_MYSQL = ("mysql", "mariadb")

# Columns of half_message and of the server's own table: ids and names are compared byte by byte everywhere.
ID = sa.String(36).with_variant(mysql.CHAR(36, **_ASCII), *_MYSQL)
NAME = sa.String(127).with_variant(mysql.VARCHAR(127, **_ASCII), *_MYSQL)
TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4"), *_MYSQL)
BODY = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), *_MYSQL)
KEY = sa.String(1024).with_variant(mysql.VARCHAR(1024, charset="utf8mb4", collation="utf8mb4_bin"), *_MYSQL)
INSTANT = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), *_MYSQL)
"""UTC, with microseconds."""


WAKE_CHANNEL = "notify_outbox"
"""The channel of PostgreSQL's NOTIFY that wakes a relay when a transaction commits outbox rows."""


KEEPALIVE = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""Settings of PostgreSQL by which it finds within half a minute that a quiet session's machine is gone (seconds)."""


def set_in_session(settings: Mapping[str, object]) -> str:
    """The statement that sets these in a session of PostgreSQL; to be committed, since a rollback takes it back."""
    return "SELECT " + ", ".join([f"set_config('{name}', '{value}', false)" for name, value in settings.items()])


UNSENT, RELAYED, REFUSED, DROPPED = 0, 1, 2, 3
"""Values of `relayed` in a row of messages: it waits for its mover, the target has it, the target refuses it for good,
a person has dropped it."""


GONE_STATES = ("08", "53", "57P", "25006", "25P03", "25P04")
"""SQLSTATEs, or how they begin, of a database that is away, full or starting, that became a standby, or that has ended
a session which did nothing, or took too long, in its transaction: they pass, here or elsewhere."""
GONE_CODES = frozenset({0, 1040, 1053, 1203, 1290, 1792, 1836, 1927, 2003, 2006, 2013, 4031})
"""The same in MySQL and MariaDB, as error codes."""


def is_gone(error: BaseException | None) -> bool:
    """Whether a driver's error says so, whatever class the driver gives it."""
    state = getattr(error, "sqlstate", None)
    if state is not None:
        return str(state).startswith(GONE_STATES)
    arguments: tuple[object, ...] = getattr(error, "args", ())
    return bool(arguments) and arguments[0] in GONE_CODES


_FULL_STATE = "53100"
_FULL_CODES = frozenset({1021, 1114})


def is_full(error: BaseException | None) -> bool:
    """Whether a driver's error says that the database has no room for more."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    arguments: tuple[object, ...] = getattr(error, "args", ())
    return getattr(error, "sqlstate", None) == _FULL_STATE or (bool(arguments) and arguments[0] in _FULL_CODES)


_UNIQUE_STATE = "23505"
_UNIQUE_CODES = frozenset({1062, 1586})
_SQLITE_UNIQUE_CODES = frozenset({sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE})


def is_doubled(error: BaseException | None) -> bool:
    """Whether a driver's error says that a row with such a key is there, and not that a row breaks another rule."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) in _SQLITE_UNIQUE_CODES
    arguments: tuple[object, ...] = getattr(error, "args", ())
    number = getattr(error, "errno", arguments[0] if arguments else None)
    return number in _UNIQUE_CODES or _state_of(error) == _UNIQUE_STATE


def drop_lost_sessions(engine: Engine) -> None:
    """Have the pool drop its sessions where the database is gone, and the error be SQLAlchemy's OperationalError.

    SQLAlchemy does so where a connection broke. One to a primary that became a standby goes on, and refuses writes.
    """

    @event.listens_for(engine, "handle_error", retval=True)
    def handle(context: Any) -> Exception | None:
        if not is_gone(context.original_exception):
            return None
        context.is_disconnect = True
        if isinstance(context.sqlalchemy_exception, sa.exc.OperationalError | sa.exc.InterfaceError):
            return None
        return sa.exc.OperationalError(
            context.statement, context.parameters, context.original_exception, connection_invalidated=True
        )


def at_level(connection: Connection, level: str) -> Connection:
    """The connection, at an isolation level such as AUTOCOMMIT from now on.

    Raises OperationalError where its session is gone: SQLAlchemy itself passes on the driver's error as it is.
    """
    try:
        return connection.execution_options(isolation_level=level)
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate(error)
        statement = f"SET TRANSACTION ISOLATION LEVEL {level}"
        raise sa.exc.OperationalError(statement, None, error, connection_invalidated=True) from error


def reason_of(error: Exception) -> str:
    """A database's driver's words for an error, on one line: not SQLAlchemy's statement, nor its link."""
    return (str(getattr(error, "orig", None) or error).strip() or repr(error)).splitlines()[0]


def shown_url(engine: Any) -> str:
    """The URL of an engine as errors and logs may show it."""
    return without_secrets(engine.url.render_as_string(hide_password=True))


def check_engine(engine: object, *, is_async: bool) -> None:
    """Raises InvalidRequest for what is no Engine, or for `is_async` no AsyncEngine or Engine."""
    if not hasattr(engine, "dialect"):
        make = "sqlalchemy.ext.asyncio.create_async_engine" if is_async else "sqlalchemy.create_engine"
        raise InvalidRequest(
            f"the engine is a {type(engine).__name__}: give what {make}(url) returns", "invalid_engine"
        )


def use_explicit_begin(engine: Any) -> None:
    """Make SQLite begin a transaction when SQLAlchemy does, with BEGIN IMMEDIATE. For sync and async engines.

    Without this, sqlite3 begins at the first write, and a released savepoint survives the rollback. A connection in
    AUTOCOMMIT begins none.
    """
    sync_engine = getattr(engine, "sync_engine", engine)

    @event.listens_for(sync_engine, "connect")
    def connect(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None

    @event.listens_for(sync_engine, "begin")
    def begin(connection: Connection) -> None:
        if _is_set_to_autocommit(connection):
            # SQLAlchemy names this event here too, and never commits: the close would roll its statements back, and
            # a read would hold the writer's lock.
            return
        driver: Any = connection.connection.dbapi_connection
        if driver.isolation_level is not None:
            driver.isolation_level = None  # the connection's last user may have set an isolation level
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def begins_explicitly(connection: Connection) -> bool:
    """Whether SQLAlchemy began SQLite's transaction, as after `use_explicit_begin`."""
    driver: Any = connection.connection.driver_connection
    return getattr(driver, "isolation_level", "") is None and bool(getattr(driver, "in_transaction", False))


def has_ended_on_sqlite(connection: Connection) -> bool:
    """Whether SQLite has no transaction any more. Drivers of other databases know it only by asking."""
    return connection.dialect.name == "sqlite" and not getattr(
        connection.connection.driver_connection, "in_transaction", True
    )


def commits_by_itself(connection: Connection) -> bool:
    """Whether each statement is a transaction of its own, by SQLAlchemy's setting or by the driver's."""
    pooled: Any = connection.connection
    # Either SQLAlchemy's adapter of an asyncio driver knows it, or the driver itself.
    drivers = (pooled.dbapi_connection, pooled.driver_connection)
    return _is_set_to_autocommit(connection) or any(map(_autocommits, drivers))


def _is_set_to_autocommit(connection: Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    return (level or getattr(connection.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"


def _autocommits(driver: Any) -> bool:
    ask = getattr(driver, "get_autocommit", None)
    said = ask() if callable(ask) else getattr(driver, "autocommit", False)
    return bool(said == 1)  # a bool or a number; in sqlite3 -1 means that `isolation_level` decides


_ABORTED_STATE = "25P02"
_NO_SAVEPOINT_STATES = ("3B001", "25P01")
_NO_SAVEPOINT_CODE = 1305


def is_of_aborted(error: BaseException | None) -> bool:
    """Whether a driver's error says that PostgreSQL has aborted the transaction after an earlier one."""
    return _state_of(error) == _ABORTED_STATE


def is_savepoint_gone(error: BaseException | None) -> bool:
    """Whether a driver's error says that there is no such savepoint: its transaction has ended since."""
    if isinstance(error, sqlite3.Error):
        return "no such savepoint" in str(error)
    arguments: tuple[object, ...] = getattr(error, "args", ())
    number = getattr(error, "errno", arguments[0] if arguments else None)
    return _state_of(error) in _NO_SAVEPOINT_STATES or number == _NO_SAVEPOINT_CODE


_UNDOING_CODES = frozenset({1020, 1206, 1213})
"""MySQL and MariaDB: a row that has changed since the snapshot, a full table of locks, a deadlock."""
_LOCK_TIMEOUT_CODE = 1205


def has_undone(name: str, driver: Any, error: BaseException | None, *, has_begun: bool = False) -> bool:
    """Whether a driver's error says that the database has rolled back the whole transaction, and takes the next
    statement for a new one. PostgreSQL refuses all statements instead until the rollback.

    `name`: the kind of database; `driver`: the driver's connection, on which MySQL is asked for a setting, or
    SQLAlchemy's pooled one; `has_begun`: SQLite's transaction is known to have begun, also where sqlite3 begins it.
    """
    if name == "sqlite":
        sqlite = getattr(driver, "driver_connection", driver)
        try:
            is_explicit = has_begun or getattr(sqlite, "isolation_level", "") is None
            return is_explicit and not getattr(sqlite, "in_transaction", True)
        except Exception:
            return True  # it is closed, and its transaction is gone
    arguments: tuple[object, ...] = getattr(error, "args", ())
    number = getattr(error, "errno", arguments[0] if arguments else None)
    if name not in _MYSQL or number != _LOCK_TIMEOUT_CODE:
        return name in _MYSQL and number in _UNDOING_CODES
    try:
        cursor = driver.cursor()
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        row: Any = cursor.fetchone()
        cursor.close()
    except Exception:
        return True  # nobody knows: what is refused can be repeated
    return bool(row[0])


def _state_of(error: BaseException | None) -> object:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def roll_back_driver(connection: Connection) -> None:
    """End the driver's transaction. A connection that is lost, or fails at this, is not used again.

    For what stops a commit in SQLAlchemy's event: SQLAlchemy takes the transaction for ended then and would give the
    connection back to the pool without a rollback, so that its next user's COMMIT would commit this one's changes.
    """
    if connection.invalidated:
        return
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception:
        connection.invalidate()


class database_now(FunctionElement[Any]):
    """The database's clock in UTC at this moment, not at the start of the transaction."""

    type = INSTANT
    inherit_cache = True


@compiles(database_now)
def _now_default(element: Any, compiler: Any, **kw: Any) -> str:
    return "CURRENT_TIMESTAMP"


@compiles(database_now, "postgresql")
def _now_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    return "(clock_timestamp() AT TIME ZONE 'utc')"


@compiles(database_now, "mysql")
@compiles(database_now, "mariadb")
def _now_mysql(element: Any, compiler: Any, **kw: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(database_now, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **kw: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


def in_transaction(engine: Engine, function: Callable[..., T], *arguments: Any) -> T:
    """Call `function(connection, *arguments)` in a transaction of its own, and return its result."""
    with engine.begin() as connection:
        return function(connection, *arguments)


async def in_transaction_async(engine: Any, function: Callable[..., T], *arguments: Any) -> T:
    """`in_transaction` for an AsyncEngine."""
    async with engine.begin() as connection:
        result: T = await connection.run_sync(function, *arguments)
        return result
