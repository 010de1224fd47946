"""Engines of SQLAlchemy for the server's databases: their URLs, drivers and time-outs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.engine.url import URL

from notify.databases import use_explicit_begin
from notify.errors import InvalidRequest

CONNECT_SECONDS = 3
IO_SECONDS = 10
"""How long a statement may take before its connection is taken for dead."""


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


def detached(engine: Engine) -> Any:
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
