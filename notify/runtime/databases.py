"""Differences between databases, for client and server: column types, clocks, error codes, and transactions."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from notify.errors import InvalidRequest
from notify.runtime.green import patched_by
from notify.runtime.urls import without_secrets

LOCK_PAUSE_MS = 5
"""The pause between two tries of a greenlet to get SQLite's lock."""
_ASCII = {"charset": "ascii", "collation": "ascii_bin"}
_MYSQL = ("mysql", "mariadb")

# The column types of half_message and of the server's tables. Names are compared byte by byte, and ids have the order
# of their times, whatever collation a database has: a Danish one has `aa` after `z`.
ID = sa.String(36).with_variant(mysql.CHAR(36, **_ASCII), *_MYSQL).with_variant(sa.String(36, "C"), "postgresql")
MESSAGE_ID = sa.String(64).with_variant(mysql.VARCHAR(64, **_ASCII), *_MYSQL)
MESSAGE_ID = MESSAGE_ID.with_variant(sa.String(64, "C"), "postgresql")
IDS = (ID, MESSAGE_ID)
NAME = sa.String(127).with_variant(mysql.VARCHAR(127, **_ASCII), *_MYSQL)
TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4"), *_MYSQL)
BODY = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), *_MYSQL)
KEY = sa.String(1024).with_variant(mysql.VARCHAR(1024, charset="utf8mb4", collation="utf8mb4_bin"), *_MYSQL)
INSTANT = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), *_MYSQL)
"""UTC, with microseconds."""
INNODB: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}
"""The options of a table, since a server may have another engine as its default; the second one is for addresses with
mariadb://."""


WAKE_CHANNEL = "notify_outbox"
"""The channel of PostgreSQL's NOTIFY that wakes a relay when a transaction commits outbox rows."""


KEEPALIVE = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""Settings of PostgreSQL (in seconds) with which it notices within half a minute that a session's machine is gone."""
CLIENT_KEEPALIVE = {name.removeprefix("tcp_"): seconds for name, seconds in KEEPALIVE.items()}
CLIENT_KEEPALIVE["tcp_user_timeout"] = 25_000
"""The same for a client, by libpq's names (the last in milliseconds): it notices that its server's machine is gone."""
MOVER_SETTINGS: Mapping[str, object] = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 0,
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
}
"""Settings of PostgreSQL sessions that read a table as a whole and then wait for a target, instead of what a role or
database has for its requests. A deferrable transaction would wait until no other one writes, those of the same process
included. They are set by a statement: as `options` of a connection they would hide those of its
URL, service or environment."""


def set_in_session(settings: Mapping[str, object]) -> str:
    """The statements that set these settings in a session of PostgreSQL. Commit them, since a rollback would undo them.

    A query would take a snapshot, for which a role's transactions may have to wait (`default_transaction_deferrable`).
    """
    return "; ".join([f"SET SESSION {name} = '{value}'" for name, value in settings.items()])


ALL_ROWS = 9_223_372_036_854_775_807
"""A limit that no answer reaches."""
MYSQL_ANY_WORK = (
    f"sql_select_limit = {ALL_ROWS}, sql_big_selects = 1, sql_safe_updates = 0, completion_type = 0 "
    "/*!50700 , max_execution_time = 0 */ /*M! , max_statement_time = 0 */"
)
"""The settings of a session of MySQL or MariaDB, for a statement SET. The first comment is read by MySQL alone, the
second one by MariaDB alone."""
_PLAIN_SQL = "sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'"
"""Not a mode in which words and quotation marks mean something else (ORACLE, ANSI_QUOTES), or texts are cut off."""
_LONG_WAITS = (
    "wait_timeout = 28800 /*M! , idle_transaction_timeout = 0, idle_readonly_transaction_timeout = 0, "
    "idle_write_transaction_timeout = 0 */"
)
"""The same for a session that waits; the time is the servers' own default."""


def set_up_mysql(connection: Any, *, waits_long: bool) -> None:
    """Give a driver's connection to MySQL or MariaDB the settings that a session of Notify's own needs, not those
    that the server has for its other clients, which may change SQL (`sql_mode`), cut answers short, show what is not
    committed, lock what is only read, end statements, refuse writes, or end the session with each commit. `waits_long`:
    whether it is a visitor in another's tables, which may wait within a transaction, as a mover does for its target.

    A visitor does not wait for rows that others have not committed: at REPEATABLE READ a statement locks every row that
    it looks at, which is the whole table if it changes most of it.
    """
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(f"SET SESSION {_PLAIN_SQL}, {MYSQL_ANY_WORK}{', ' + _LONG_WAITS if waits_long else ''}")
        level = "REPEATABLE READ"
        if waits_long:
            cursor.execute("SHOW VARIABLES LIKE 'binlog_format'")
            if (cursor.fetchone() or ("", ""))[1] != "STATEMENT":  # with which writes at the other level are refused
                level = "READ COMMITTED"
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}, READ WRITE")


def whole(query: sa.Select[Any]) -> sa.Select[Any]:
    """A query of a service's own session whose answer must not be cut short: with a LIMIT of its own, that of the
    session (`sql_select_limit` of MySQL and MariaDB) does not hold."""
    return query.limit(ALL_ROWS)


UNSENT, RELAYED, REFUSED, DROPPED, LEFT_BEHIND = 0, 1, 2, 3, 4
"""Values of the column `relayed`: the message waits for a relay or bridge, the target has it, the target refuses it
finally, an operator has dropped it, or (mode `auto`) the server did not store its half before the commit, so that it
waits for a process of its group, a relay or a bridge."""


GONE_STATES = ("08", "53", "57P", "25006", "25P03", "25P04")
"""SQLSTATEs, or their first characters, of passing errors: the database is unreachable, full or starting, became a
standby, or has ended a session whose transaction was idle or took too long."""
GONE_CODES = frozenset(
    {
        0,  # PyMySQL's own, for a connection that is closed
        *(1040, 1135, 1203, 1226),  # too many connections, threads, or connections of this user
        *(1053, 1290, 1792, 1836, 3032),  # shutting down, read-only in four ways, offline
        1047,  # Galera: this node is not in the cluster now
        *(1927, 3169, 4031),  # the session was killed; on MySQL also after `wait_timeout`
        *(2002, 2003, 2006, 2013, 2055),  # the driver's: it cannot connect, or has lost the connection
    }
)
"""The error codes of MySQL and MariaDB for the same errors."""
AGAIN_CODES = frozenset(
    {
        *(1020, 1205, 1213),  # the row has changed since the snapshot, a lock was not granted in time, a deadlock
        *(1412, 1684),  # another session has changed the table since the snapshot, or is changing it
        *(1317, 1969, 3024),  # the statement was killed, or took too long for a setting of MariaDB or MySQL
        *(3101, 3572),  # Group Replication undoes what another node has changed; a lock is not free (NOWAIT)
    }
)
"""The error codes of MySQL and MariaDB after which the same transaction may succeed. What each server answers is tested
in tests/contract/test_dialects.py."""


def _state_of(error: BaseException | None) -> str:
    """The SQLSTATE of a driver's error, or "". psycopg2 calls it pgcode; pg8000 has the server's fields as a dict."""
    arguments: tuple[object, ...] = getattr(error, "args", ())
    fields = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or fields.get("C", ""))


def _code_of(error: BaseException | None) -> object:
    """The number of a driver's error: its first argument, or for MySQL's and MariaDB's own drivers its errno. None if
    it has none."""
    arguments: tuple[object, ...] = getattr(error, "args", ())
    number = getattr(error, "errno", None)
    if number is None and arguments and isinstance(arguments[0], int):
        number = arguments[0]
    return number


_STALE_PLAN = "RevalidateCachedQuery"
"""The function of PostgreSQL that refuses a statement which a session prepared before a column got another type: it
fails in this session for ever, and the SQLSTATE (0A000) says only that something is not supported."""


def is_gone(error: BaseException | None) -> bool:
    """Whether a driver's error, of any class, has one of these SQLSTATEs or codes, or only another session can execute
    the same statement.

    PyMySQL's errors have both, and most of MySQL's SQLSTATEs are the general HY000.
    """
    if getattr(getattr(error, "diag", None), "source_function", None) == _STALE_PLAN:
        return True
    return _state_of(error).startswith(GONE_STATES) or _code_of(error) in GONE_CODES


def drop_if_gone(connection: Connection, error: BaseException | None) -> None:
    """Have the pool make a new session if only another one can do what a driver's error refuses. SQLAlchemy does this
    for broken connections only: after a failover sessions with the former primary stay open, and refuse writes."""
    if is_gone(error) and not (connection.closed or connection.invalidated):
        connection.invalidate(error)


def allow_writes(connection: Connection) -> None:
    """Let a transaction of PostgreSQL write that has run no query yet. A standby refuses that, so the pool makes a new
    session, which may lead to the primary. Raises DBAPIError."""
    try:
        connection.exec_driver_sql("SET TRANSACTION READ WRITE")
    except sa.exc.DBAPIError as error:
        connection.invalidate(error.orig)
        raise


def is_lost(error: BaseException) -> bool:
    """Whether SQLAlchemy's error says that the connection, or the database, is gone."""
    return isinstance(error, sa.exc.DBAPIError) and (error.connection_invalidated or is_gone(error.orig))


_HELD_UP_STATES = ("40", "55P03", "57014")
_HELD_UP_SQLITE_CODES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


def is_held_up(error: BaseException | None) -> bool:
    """Whether a driver's error says that a statement met a lock, or was ended for another session or for its time: the
    same statement may succeed later."""
    if isinstance(error, sqlite3.Error):
        return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _HELD_UP_SQLITE_CODES
    return _code_of(error) in AGAIN_CODES or _state_of(error).startswith(_HELD_UP_STATES)


_DENIED_STATE = "42501"
_DENIED_CODES = frozenset({1044, 1142, 1143})


def is_denied(error: BaseException | None) -> bool:
    """Whether a driver's error says that this user has no right to a database, table or column."""
    return _state_of(error) == _DENIED_STATE or _code_of(error) in _DENIED_CODES


_LEVEL_REFUSED_CODE = 1665


def is_level_refused(error: BaseException | None) -> bool:
    """Whether a driver's error says that MySQL or MariaDB takes no writes at READ COMMITTED, because it logs statements
    (binlog_format)."""
    return _code_of(error) == _LEVEL_REFUSED_CODE


_READ_ONLY_STATE, _READ_ONLY_CODE = "25006", 1792


def is_read_only(error: BaseException | None) -> bool:
    """Whether a driver's error says that the transaction may only read."""
    return _state_of(error) == _READ_ONLY_STATE or _code_of(error) == _READ_ONLY_CODE


_FULL_STATE = "53100"
_FULL_CODES = frozenset({1021, 1114})


def is_full(error: BaseException | None) -> bool:
    """Whether a driver's error says that the database's disk or table is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return _state_of(error) == _FULL_STATE or _code_of(error) in _FULL_CODES


_UNSTORABLE_STATES = ("22001", "22021", "22P05")
_UNSTORABLE_CODES = frozenset({1265, 1300, 1366, 1406, 3854, 3988})


def is_unstorable(error: BaseException | None) -> bool:
    """Whether a driver's error says that a text is too long for its column, or has characters that the connection or
    the database cannot have. psycopg itself refuses NUL, with a DataError that has no SQLSTATE."""
    if _code_of(error) in _UNSTORABLE_CODES or _state_of(error) in _UNSTORABLE_STATES:
        return True
    return type(error).__name__ == "DataError" and "NUL" in str(error)


_LOGIN_STATE = "28"
_LOGIN_CODES = frozenset({1045, 1129, 1130})
_DRIVERS_CODES = range(2000, 3000)
"""The codes of MySQL's and MariaDB's client libraries: they have no connection, or have lost it."""


def says_away(error: BaseException) -> bool:
    """Whether a driver's error says that its database does not answer now, or lets this client not in: the same work
    may succeed later, and no other work would succeed now.

    The class alone does not tell: PyMySQL and SQLite have OperationalError for most errors, also for a missing column,
    and asyncpg has no such class.
    """
    code, state = _code_of(error), _state_of(error)
    if is_gone(error) or is_held_up(error) or is_full(error) or state.startswith(_LOGIN_STATE) or code in _LOGIN_CODES:
        return True
    if isinstance(error, sqlite3.Error):
        return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_CANTOPEN
    if isinstance(code, int):
        return code in _DRIVERS_CODES
    kinds = {kind.__name__ for kind in type(error).__mro__}  # the names that PEP 249 gives
    return not state and ("OperationalError" in kinds or "InterfaceError" in kinds)  # of the driver, not the database


def is_away(error: BaseException) -> bool:
    """Whether an error of SQLAlchemy says that the database does not answer now, or that its pool has no free
    connection. Drivers of asyncio raise OSError, or their own errors, where they cannot connect."""
    if isinstance(error, OSError | sa.exc.TimeoutError | sa.exc.InterfaceError):
        return True
    if isinstance(error, sa.exc.DBAPIError):
        return error.connection_invalidated or (error.orig is not None and says_away(error.orig))
    return bool(getattr(error, "sqlstate", "")) and says_away(error)  # SQLAlchemy wraps none of a connect by asyncpg


_UNIQUE_STATE = "23505"
_UNIQUE_CODES = frozenset({1062, 1586})
_SQLITE_UNIQUE_CODES = frozenset({sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE})


def is_doubled(error: BaseException | None) -> bool:
    """Whether a driver's error says that a row with the same key exists, and not that another constraint is broken."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) in _SQLITE_UNIQUE_CODES
    return _code_of(error) in _UNIQUE_CODES or _state_of(error) == _UNIQUE_STATE


def drop_lost_sessions(engine: Engine) -> None:
    """Let the pool drop its sessions when the database is gone, and raise the error as SQLAlchemy's OperationalError.

    SQLAlchemy does this itself only for broken connections. A connection to a primary that became a standby stays open
    and refuses writes.
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


def schema_of(bound: Connection | Engine) -> str | None:
    """The schema into which an engine or connection translates tables without one (`schema_translate_map`)."""
    schemas = bound.get_execution_options().get("schema_translate_map") or {}
    return str(schemas[None]) if schemas.get(None) else None


def within_schema(engine: Engine, schema: str | None) -> Engine:
    """The same engine, with the same pool, whose tables without a schema are in this one; None or "": as it is."""
    return engine.execution_options(schema_translate_map={None: schema}) if schema else engine


_NO_TABLE_CODE, _NO_TABLE_STATES = 1146, ("42P01", "3F000")
_NO_COLUMN_CODE, _NO_COLUMN_STATE = 1054, "42703"


def is_column_missing(error: BaseException | None) -> bool:
    """Whether a driver's error says that a table has no such column."""
    if isinstance(error, sqlite3.Error):
        return "no column named" in str(error)
    return _state_of(error) == _NO_COLUMN_STATE or _code_of(error) == _NO_COLUMN_CODE


def is_database_missing(error: BaseException | None) -> bool:
    """Whether a driver's error says that MySQL or MariaDB, or SQLite, has no such database. Texts of errors are in the
    language of the server."""
    if isinstance(error, sqlite3.Error):
        return "unknown database" in str(error)
    return _code_of(error) == _NO_SUCH_DATABASE


def is_table_missing(error: BaseException | None) -> bool:
    """Whether a driver's error says that a table, or its schema, does not exist."""
    if isinstance(error, sqlite3.Error):
        return "no such table" in str(error)
    return (
        _state_of(error) in _NO_TABLE_STATES or _code_of(error) == _NO_TABLE_CODE or is_database_missing(error)
    )  # to MySQL a schema is a database


def quoted(connection: Connection, schema: str) -> str:
    """A schema's name in quotes, for any text but a statement that a driver formats: percent signs are as they are."""
    mark = connection.dialect.identifier_preparer.initial_quote
    return mark + schema.replace(mark, mark * 2) + mark


def has_table(connection: Connection | Engine, name: str, schema: str | None = None) -> bool:
    """Whether the database has a table, or a view in its place, in a schema; None: that of `schema_of`.

    SQLAlchemy asks MySQL and MariaDB to describe it, which MySQL refuses within a transaction (1684) while another
    session makes or changes the table. The list of tables is always there. SQLAlchemy's own reading of it asks for the
    kind of every table, for which MariaDB opens their files, and leaves out tables with SYSTEM VERSIONING.
    """
    schema = schema or schema_of(connection)
    if connection.dialect.name not in _MYSQL:
        return sa.inspect(connection).has_table(name, schema=schema)
    if isinstance(connection, Engine):
        with connection.connect() as session:
            return has_table(session, name, schema)
    of_schema = f" FROM {quoted(connection, schema)}" if schema else ""
    try:
        # An underscore stands for any character here, so there may be others.
        found = connection.exec_driver_sql(f"SHOW TABLES{of_schema} LIKE '{name}'".replace("%", "%%"))
    except sa.exc.OperationalError as error:
        if schema and is_database_missing(error.orig):
            return False
        raise
    return name in found.scalars().all()


_NO_SUCH_DATABASE = 1049


def at_level(connection: Connection, level: str) -> Connection:
    """Set the connection's isolation level, such as AUTOCOMMIT, and return the connection.

    Raises OperationalError if its session is gone, where SQLAlchemy itself would raise the driver's error.
    """
    try:
        return connection.execution_options(isolation_level=level)
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate(error)
        statement = f"SET TRANSACTION ISOLATION LEVEL {level}"
        raise sa.exc.OperationalError(statement, None, error, connection_invalidated=True) from error


def reason_of(error: BaseException) -> str:
    """The driver's text of an error, on one line, without the statement and the link that SQLAlchemy adds."""
    return (str(getattr(error, "orig", None) or error).strip() or repr(error)).splitlines()[0]


def shown_url(engine: Any) -> str:
    """The URL of an engine, without secrets, for errors and logs."""
    return without_secrets(engine.url.render_as_string(hide_password=True))


def check_engine(engine: object, *, is_async: bool) -> None:
    """Raises InvalidRequest if `engine` is neither an Engine nor an AsyncEngine, or the engine within an AsyncEngine;
    `is_async`: which one to suggest."""
    if not hasattr(engine, "dialect"):
        make = "sqlalchemy.ext.asyncio.create_async_engine" if is_async else "sqlalchemy.create_engine"
        raise InvalidRequest(
            f"the engine is a {type(engine).__name__}: give what {make}(url) returns", "invalid_engine"
        )
    if getattr(engine.dialect, "is_async", False) and isinstance(engine, Engine):
        raise InvalidRequest(
            "the engine has a driver for asyncio, which works in coroutines alone: use AsyncTransactionProducer or "
            "AsyncConsumer with the AsyncEngine, not its sync_engine, or make an engine with another driver",
            "invalid_engine",
        )
    if getattr(engine.dialect, "driver", "") == "aiomysql":
        _let_aiomysql_send_bytes()


def _let_aiomysql_send_bytes() -> None:
    """Give aiomysql the function with which PyMySQL escapes bytes.

    PyMySQL 1.2 has a text under the name that aiomysql 0.3 imports (https://github.com/PyMySQL/PyMySQL/issues/1274), so
    that each statement with bytes, such as a message's body, raised a TypeError.
    """
    from aiomysql import connection
    from pymysql import converters

    if isinstance(getattr(connection, "escape_bytes_prefixed", None), str):
        connection.escape_bytes_prefixed = converters.escape_bytes


_BEGIN = "BEGIN IMMEDIATE"


def use_explicit_begin(engine: Any) -> None:
    """Make SQLite begin a transaction when SQLAlchemy does, with BEGIN IMMEDIATE. For sync and async engines.

    Without this, sqlite3 begins a transaction at the first write, and a released savepoint survives the rollback. A
    connection in AUTOCOMMIT begins no transaction.
    """
    sync_engine = getattr(engine, "sync_engine", engine)

    @event.listens_for(sync_engine, "connect")
    def connect(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None

    @event.listens_for(sync_engine, "begin")
    def begin(connection: Connection) -> None:
        if _is_set_to_autocommit(connection):
            # SQLAlchemy fires this event in AUTOCOMMIT too, but never commits then: the close would roll back the
            # statements, and a read would hold the write lock.
            return
        driver: Any = connection.connection.dbapi_connection
        if driver.isolation_level is not None:
            driver.isolation_level = None  # the connection's last user may have set an isolation level
        # An empty transaction without the lock: of sqlite3 with autocommit=False, or of a hook of the service's own.
        has_begun = getattr(connection.connection.driver_connection, "in_transaction", False)
        try:
            if has_begun:
                tell(connection, "ROLLBACK")
            if isinstance(driver, sqlite3.Connection) and patched_by() and _has_begun(driver):
                return
            tell(connection, _BEGIN)
        except Exception as error:
            if has_begun:
                tell(connection, "BEGIN")  # sqlite3 takes it for open, and fails to roll back what is not
            raise as_sqlalchemys(connection, _BEGIN, error) from error


def _has_begun(driver: sqlite3.Connection) -> bool:
    """Begin a transaction, and let the other greenlets run while SQLite's lock is taken: SQLite's own wait would stop
    all of them, also the one that has the lock. False if the lock is still taken after the time that is set."""
    milliseconds = driver.execute("PRAGMA busy_timeout").fetchone()[0]
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        for _ in range(milliseconds // LOCK_PAUSE_MS):
            try:
                driver.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError:
                time.sleep(LOCK_PAUSE_MS / 1000)
    finally:
        driver.execute(f"PRAGMA busy_timeout = {milliseconds}")
    return False


def tell(connection: Connection, statement: str, parameters: Sequence[Any] = ()) -> int:
    """Execute a statement without a result by the driver alone, and return the number of written rows, or -1: what
    SQLAlchemy and the driver do around a statement on a savepoint costs more than the database's part. Begins a
    transaction where the driver does.

    Raises the driver's error, of any class: see `as_sqlalchemys`. If the caller is cancelled meanwhile, the connection
    is not used again, as with a statement of SQLAlchemy's: nobody knows what it has begun.
    """
    try:
        return _told(connection, statement, parameters)
    except Exception:
        raise
    except BaseException:
        connection.invalidate()
        raise


def _told(connection: Connection, statement: str, parameters: Sequence[Any]) -> int:
    pooled: Any = connection.connection
    if has_threaded_driver(connection):
        cursor = pooled.dbapi_connection.run_async(lambda connection: connection.execute(statement, parameters))
        return int(cursor.rowcount)
    if (
        connection.dialect.driver == "psycopg"
        and not connection.dialect.is_async
        and not parameters
        and _has_told(pooled.driver_connection, statement)
    ):
        return -1
    cursor = pooled.dbapi_connection.cursor()
    try:
        cursor.execute(statement, parameters) if parameters else cursor.execute(statement)
        return int(cursor.rowcount)
    finally:
        cursor.close()


def has_threaded_driver(connection: Connection) -> bool:
    """Whether the driver is aiosqlite: each step of a statement is a step of its thread, and a cursor of SQLAlchemy's
    has three, `tell` one."""
    return connection.dialect.driver == "aiosqlite"


def as_sqlalchemys(connection: Connection, statement: str, error: Exception) -> BaseException:
    """The error of `tell` as SQLAlchemy would raise it, but for a lost connection, which stays in its pool."""
    return sa.exc.DBAPIError.instance(
        statement, None, error, connection.dialect.loaded_dbapi.Error, dialect=connection.dialect
    )


_IDLE, _IN_TRANSACTION, _IS_DONE = 0, 2, 1
"""libpq's numbers: for a connection without a transaction, for one with, and for a statement that succeeded."""


def _has_told(driver: Any, statement: str) -> bool:
    """Execute a statement by libpq's own function, in one round trip with BEGIN if no transaction has begun. False if
    psycopg has to do it: it waits as greenlets do, and begins with other settings than the database's."""
    libpq = getattr(driver, "pgconn", None)
    if libpq is None or driver.autocommit or libpq.pipeline_status or patched_by():
        return False
    if libpq.transaction_status == _IDLE:
        if (driver.isolation_level, driver.read_only, driver.deferrable) != (None, None, None):
            return False
        statement = f"BEGIN;{statement}"
    elif libpq.transaction_status != _IN_TRANSACTION:
        return False
    result = libpq.exec_(statement.encode())
    if result.status != _IS_DONE:
        from psycopg.errors import error_from_result

        raise error_from_result(result)
    return True


def begins_explicitly(connection: Connection) -> bool:
    """Whether SQLite's transaction was begun explicitly, as after `use_explicit_begin`."""
    driver: Any = connection.connection.driver_connection
    return getattr(driver, "isolation_level", "") is None and bool(getattr(driver, "in_transaction", False))


def has_ended_on_sqlite(connection: Connection) -> bool:
    """Whether SQLite's transaction has ended. For other databases this is False, as drivers would have to ask them."""
    return connection.dialect.name == "sqlite" and not getattr(
        connection.connection.driver_connection, "in_transaction", True
    )


def commits_by_itself(connection: Connection) -> bool:
    """Whether each statement is a separate transaction, by SQLAlchemy's setting or by the driver's.

    Where a MySQL has the global setting autocommit = 0, it tells each driver that new sessions commit by themselves.
    """
    pooled: Any = connection.connection
    # For an asyncio driver, either SQLAlchemy's adapter or the driver itself has the setting.
    drivers = (pooled.dbapi_connection, pooled.driver_connection)
    if _is_set_to_autocommit(connection):
        return True
    if not any(map(_autocommits, drivers)):
        return False
    return connection.dialect.name not in _MYSQL or bool(_asked(pooled.dbapi_connection, "SELECT @@SESSION.autocommit"))


def drop_if_nested(connection: Connection) -> bool:
    """Whether what SQLAlchemy takes for a transaction is a savepoint within another one, which its commit would leave
    open. The connection is not used again then, so that nothing of it is committed.

    asyncpg nests so after a BEGIN that was cancelled in a listener of the service's own, which SQLAlchemy does not
    notice (https://github.com/sqlalchemy/sqlalchemy/issues/13381).
    """
    transaction = getattr(connection.connection.dbapi_connection, "_transaction", None)
    if not getattr(transaction, "_nested", False):
        return False
    connection.invalidate()
    return True


NESTED = (
    "the connection already had an open transaction, of somebody who was cancelled or of the driver's own, which the "
    "commit would not end; the connection is dropped: repeat the transaction"
)


def _asked(driver: Any, query: str) -> Any:
    """A query's value on a driver's connection, with no transaction of SQLAlchemy's."""
    cursor = driver.cursor()
    try:
        cursor.execute(query)
        return cursor.fetchone()[0]
    finally:
        cursor.close()


def _is_set_to_autocommit(connection: Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    return (level or getattr(connection.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"


def _autocommits(driver: Any) -> bool:
    ask = getattr(driver, "get_autocommit", None)
    autocommit = ask() if callable(ask) else getattr(driver, "autocommit", False)
    return bool(autocommit == 1)  # a bool or a number; in sqlite3, -1 means that `isolation_level` decides


_ABORTED_STATE = "25P02"
_NO_SAVEPOINT_STATES = ("3B001", "25P01")
_NO_SAVEPOINT_CODE = 1305


def is_of_aborted(error: BaseException | None) -> bool:
    """Whether a driver's error says that PostgreSQL has aborted the transaction after an earlier error."""
    return _state_of(error) == _ABORTED_STATE


def is_savepoint_gone(error: BaseException | None) -> bool:
    """Whether a driver's error says that the savepoint does not exist, because its transaction has ended."""
    if isinstance(error, sqlite3.Error):
        return "no such savepoint" in str(error)
    return _state_of(error) in _NO_SAVEPOINT_STATES or _code_of(error) == _NO_SAVEPOINT_CODE


_UNDOING_CODES = frozenset({1020, 1206, 1213, 3101})
"""Codes of MySQL and MariaDB: a row has changed since the snapshot, the lock table is full, a deadlock, Group
Replication undoes what another node has changed."""
_LOCK_TIMEOUT_CODE = 1205


def has_undone(name: str, driver: Any, error: BaseException | None, *, has_begun: bool = False) -> bool:
    """Whether a driver's error says that the database has rolled back the whole transaction, so that the next statement
    begins a new one. (PostgreSQL instead refuses all statements until the rollback.)

    `name`: the kind of database; `driver`: the driver's connection, or SQLAlchemy's pooled one, on which MySQL is asked
    for a setting; `has_begun`: whether SQLite's transaction is known to have begun, even if sqlite3 began it.
    """
    if name == "sqlite":
        sqlite = getattr(driver, "driver_connection", driver)
        try:
            is_explicit = has_begun or getattr(sqlite, "isolation_level", "") is None
            return is_explicit and not getattr(sqlite, "in_transaction", True)
        except Exception:
            return True  # the connection is closed, and its transaction has ended
    code = _code_of(error)
    if name not in _MYSQL or code != _LOCK_TIMEOUT_CODE:
        return name in _MYSQL and code in _UNDOING_CODES
    try:
        return bool(_asked(driver, "SELECT @@innodb_rollback_on_timeout"))
    except Exception:
        return True  # unknown: assume a rollback, since a refused transaction can be repeated


def roll_back_driver(connection: Connection) -> None:
    """Roll back the driver's transaction. If this fails, or the connection is lost, the connection is not used again.

    Call this when an exception in SQLAlchemy's `commit` event stops the commit. SQLAlchemy believes that the
    transaction has ended, and would return the connection to the pool without a rollback; the COMMIT of its next user
    would then commit these changes.
    """
    if connection.invalidated:
        return
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception:
        connection.invalidate()
    except BaseException:  # cancelled once more, as anyio does at each step: the transaction may still be open
        connection.invalidate()
        raise


_ON_THE_SERVER = ("stream_results", "yield_per")


@contextlib.contextmanager
def without_server_cursors(connection: Connection) -> Iterator[None]:
    """Within the block no statement of a connection is a cursor on the server, as its engine's options may ask:
    PostgreSQL has these for queries alone, and only within a transaction."""
    options = connection.get_execution_options()
    asked = {name: options[name] for name in _ON_THE_SERVER if options.get(name)}
    if not asked:
        yield
        return
    connection.execution_options(**dict.fromkeys(asked))
    try:
        yield
    finally:
        connection.execution_options(**asked)


class database_now(FunctionElement[Any]):
    """The current time of the database's clock in UTC, not the time of the transaction's start."""

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
