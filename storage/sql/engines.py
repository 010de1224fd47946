"""SQLAlchemy engines for the server's databases: URLs, drivers and timeouts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.url import URL

from notify.errors import InvalidRequest, StorageFailed
from notify.runtime.databases import (
    CLIENT_KEEPALIVE,
    KEEPALIVE,
    drop_lost_sessions,
    set_in_session,
    set_up_mysql,
    use_explicit_begin,
)
from notify.runtime.extras import remedy
from notify.runtime.pooler import REMEDY, TRANSACTION, pool_mode
from notify.runtime.urls import check_host, without_secrets

CONNECT_SECONDS = 3
IO_SECONDS = 10
"""How long a statement may take until its connection is considered dead."""
LOCK_SECONDS = 2
IDLE_IN_TRANSACTION_SECONDS = 15
"""The database ends a session that is idle in its transaction for this long, so that the locks of a frozen server,
or of a lost machine, are released."""
IDLE_SECONDS = 60
"""The same for MySQL, which bounds the idle time of the whole session only."""
VISITOR_READ_SECONDS = 60
"""How long MySQL may take to answer a mover or a command: longer than a server's statement, because pages and purges of
large tables are slow. `read_timeout` in the URL takes precedence."""
RECYCLE_SECONDS = 30
"""How long a connection to MySQL or MariaDB is used: less than the time after which the database ends it."""


def make_engine(
    url: str, named: str, options: Callable[[URL], Mapping[str, Any]], *, sets_sessions: bool = False
) -> Engine:
    """An engine for a URL, with the driver of this package and SQLAlchemy's `options` for the parsed URL.

    `named`: the flag or setting that has the URL. `sets_sessions`: its sessions get bounds, and connecting raises
    StorageFailed where a pooler would give each transaction another session. Sessions of MySQL and MariaDB do not have
    the server's settings for its other clients: see set_up_mysql.

    Raises InvalidRequest with what is wrong with the URL, or with the driver that is missing; and what `options`
    raises.
    """
    try:
        parsed = with_driver(parsed_url(url))
        # A service's URL may name an encoding that lacks characters of its keys: MySQL and MariaDB would give them as
        # "?", and PostgreSQL no row at all.
        for option, encoding in (("charset", "utf8mb4"), ("client_encoding", "utf8")):
            if option in parsed.query:
                parsed = parsed.update_query_dict({option: encoding})
        check_host(parsed.host)
        if parsed.get_dialect().is_async:
            kind = parsed.get_backend_name()
            raise InvalidRequest(f"{named} {_shown(url)}: its driver is one for asyncio: write {kind}://…")
        _check_driver(parsed, named)
        engine = sa.create_engine(parsed, **options(parsed))
    except (ValueError, sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
        raise InvalidRequest(f"{named} {_shown(url)}: {_reason(error)}") from None
    if sets_sessions and engine.dialect.name == "postgresql":
        _refuse_transaction_mode(engine, named)  # before the next listener, which connects
    _name_options(engine, named)
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    if engine.dialect.name in ("mysql", "mariadb"):

        @event.listens_for(engine, "connect", insert=True)  # before SQLAlchemy asks the server for anything
        def set_up(connection: Any, _: Any) -> None:
            set_up_mysql(connection, waits_long=not sets_sessions)

    return engine


def open_engine(
    url: str, *, named: str = "--storage", pooled: bool = True, statement_seconds: int = IO_SECONDS
) -> Engine:
    """An engine for a database of the server. `pooled`: keep connections open between uses.

    `statement_seconds`: how long a statement may take. `named`, and errors: as for `make_engine`. Connecting raises
    StorageFailed where a pooler would give each transaction another session.
    """

    def options(parsed: URL) -> dict[str, Any]:
        _check_kind(parsed, named)
        pool: dict[str, Any] = {"poolclass": sa.NullPool}
        if pooled:
            is_mysql = parsed.get_backend_name() in ("mysql", "mariadb")
            pool = {"pool_size": 8, "max_overflow": 8, "pool_recycle": RECYCLE_SECONDS if is_mysql else -1}
        if parsed.get_backend_name() != "sqlite":
            # With this isolation a waiting UPDATE sees what the previous one wrote, and locks no gaps.
            # Set once in each session. As an option of the engine it would be set in each transaction, and if that
            # failed SQLAlchemy would raise the driver's own error, which no caller expects.
            pool["isolation_level"] = "READ COMMITTED"
        return pool | {"connect_args": _arguments(parsed, statement_seconds)}

    engine = make_engine(url, named, options, sets_sessions=True)
    if engine.dialect.name != "sqlite":
        drop_lost_sessions(engine)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", functools.partial(_set_up_postgresql, statement_seconds))
    if engine.dialect.name in ("mysql", "mariadb"):
        event.listen(engine, "connect", _bound_mysql)
    return engine


def visitor_engine(url: str) -> Engine:
    """An engine for another's database: that of a relay, or of a command for a service's tables.

    A connection to a lost machine ends within a minute, unless the URL says otherwise. The bounds
    of a server's sessions do not apply. Raises the errors of `make_engine`.
    """

    def options(parsed: URL) -> dict[str, Any]:
        _check_kind(parsed, "--dsn")
        bounds = _reachability(parsed, VISITOR_READ_SECONDS) if parsed.get_driver_name() in _KNOWN_DRIVERS else {}
        return {"connect_args": {name: value for name, value in bounds.items() if name not in parsed.query}}

    return make_engine(url, "--dsn", options)


def _reason(error: Exception) -> str:
    """The error for an invalid URL; for a missing driver it names the extra."""
    return (remedy(error) if isinstance(error, ImportError) else None) or str(error)


@contextlib.contextmanager
def opened(url: str) -> Iterator[Engine]:
    """A context manager with an engine, whose connections are closed at the end. Raises what `open_engine` raises."""
    engine = open_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


def detached(engine: Engine) -> Any:
    """A driver's connection, detached from the pool."""
    pooled = engine.raw_connection()
    connection = pooled.driver_connection
    pooled.detach()
    return connection


def parsed_url(url: str) -> URL:
    """Raises ArgumentError if the text is not the URL of a database."""
    try:
        return sa.make_url(url)
    except sa.exc.ArgumentError:
        raise sa.exc.ArgumentError(
            "this is not a database URL, such as postgresql://user:password@host/database or sqlite:///file"
        ) from None
    except ValueError:  # its text may show a part of a password that contains an @
        raise sa.exc.ArgumentError(
            "its port is not a number; write @, : and / within a password as %40, %3A and %2F"
        ) from None


def _check_kind(url: URL, named: str) -> None:
    kind = url.get_backend_name()
    if kind not in ("sqlite", "postgresql", "postgres", "mysql", "mariadb"):
        raise InvalidRequest(f"{named}: {kind} is not served; PostgreSQL, MySQL, MariaDB, SQLite are")


def _check_driver(url: URL, named: str) -> None:
    """Raises InvalidRequest for a driver of PostgreSQL that can neither wait for a commit nor read or write by COPY as
    psycopg does. With MySQL and MariaDB nothing rests on the driver."""
    driver = url.get_driver_name()
    if url.get_backend_name() == "postgresql" and driver != "psycopg":
        raise InvalidRequest(f"{named}: its driver {driver} is not psycopg, which this needs: write postgresql://…")


def _name_options(engine: Engine, named: str) -> None:
    """Let a connection raise InvalidRequest for an option in the URL that its driver does not know, and take a password
    of any letters."""

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, _: Any, arguments: Any, options: dict[str, Any]) -> Any:
        if dialect.driver == "pymysql" and "password" in options:
            options = options | {"password": encoded_password(options["password"])}
        try:
            return dialect.connect(*arguments, **options)
        except TypeError as error:  # PyMySQL's; other drivers raise an error of the DB-API
            raise InvalidRequest(f"{named}: the driver refuses an option of the URL: {error}") from error


def with_driver(url: URL) -> URL:
    """`mysql://` and `postgresql://` with the drivers that this package installs. A service's URL may name psycopg2,
    which has the parameters of the same libpq."""
    drivers = {"mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql", "postgresql": "postgresql+psycopg"}
    drivers["postgres"] = drivers["postgresql+psycopg2"] = drivers["postgresql"]
    return url.set(drivername=drivers.get(url.drivername, url.drivername))


def encoded_password(text: str) -> bytes:
    """A password as MySQL and MariaDB compare it. PyMySQL would send a text in Latin-1, and fail at other letters."""
    return text.encode()


_KNOWN_DRIVERS = ("pymysql", "mysqldb", "psycopg")
"""Drivers that take the arguments of `_reachability`."""


def _arguments(url: URL, read_seconds: int) -> dict[str, Any]:
    name = url.get_backend_name()
    if name == "sqlite":
        return {"timeout": 2, "check_same_thread": False}
    return _reachability(url, read_seconds)


def _reachability(url: URL, read_seconds: int) -> dict[str, Any]:
    """A driver's arguments for reading texts, and for noticing that the database's machine is lost.

    `read_seconds`: how long MySQL may take to answer; its driver has no other bound.
    """
    name = url.get_backend_name()
    if name in ("mysql", "mariadb"):
        return {"connect_timeout": CONNECT_SECONDS, "read_timeout": read_seconds, "write_timeout": IO_SECONDS}
    if name == "postgresql":
        return CLIENT_KEEPALIVE | {
            # Texts of an SQL_ASCII database, which initdb makes without a locale, would be read as bytes.
            "client_encoding": "utf8",
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": IO_SECONDS * 1000,
        }
    return {}


def _refuse_transaction_mode(engine: Engine, named: str) -> None:
    """Detect a pooler before the first session is set up: the bounds would apply to the pooler's other clients."""
    has_looked = False

    @event.listens_for(engine, "do_connect")
    def look(dialect: Any, _: Any, arguments: Any, options: dict[str, Any]) -> None:
        nonlocal has_looked
        if has_looked:
            return
        bare = sa.create_engine(
            engine.url, poolclass=sa.NullPool, creator=lambda: dialect.connect(*arguments, **options)
        )
        if pool_mode(bare) == TRANSACTION:
            raise StorageFailed(f"{named}: {REMEDY}")
        has_looked = True


def _bound_mysql(connection: Any, _: Any) -> None:
    """Bounds of a session, set by a statement, because an `init_command` may be that of the URL. Only MySQL reads the
    first comment, and only MariaDB the second."""
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(
            f"SET SESSION innodb_lock_wait_timeout = {LOCK_SECONDS} "
            f"/*!50700 , wait_timeout = {IDLE_SECONDS} */ "
            f"/*M! , idle_transaction_timeout = {IDLE_IN_TRANSACTION_SECONDS} */"
        )


def _set_up_postgresql(statement_seconds: int, connection: Any, _: Any) -> None:
    """Bounds of a session, set by a statement, because a pooler refuses them in the connection's `options`."""
    bounds = {
        "statement_timeout": statement_seconds * 1000,
        "lock_timeout": LOCK_SECONDS * 1000,
        "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_SECONDS * 1000,
        "default_transaction_isolation": "read committed",
    }
    with connection.cursor() as cursor:
        cursor.execute(set_in_session(bounds | KEEPALIVE))
    connection.commit()  # a rollback would undo the bounds


def _shown(url: str) -> str:
    try:
        parsed_url(url)
    except sa.exc.ArgumentError:
        return "(not a URL)"
    return without_secrets(url)
