"""DjangoEngine: lends one of Django's databases to SQLAlchemy, so that Notify's statements are written only once.

`borrow` lends the driver's connection that Django has open: statements run in Django's transaction, which only Django
ends. `engine` opens separate connections, exactly as Django opens them, for threads that need their own transactions:
answering checks and purging.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from django import db
from sqlalchemy.pool import NullPool, PoolProxiedConnection

from notify.errors import BindingRefused
from notify.runtime.databases import use_explicit_begin

DIALECTS = {
    "psycopg": "postgresql+psycopg",
    "psycopg2": "postgresql+psycopg2",
    "MySQLdb": "mysql+mysqldb",
    "pymysql": "mysql+pymysql",
    "sqlite3": "sqlite",
}
"""SQLAlchemy's names of the drivers that Django's backends use; PyMySQL may replace mysqlclient."""


_INFO = "notify_info"
"""The attribute of a Django connection that holds its driver's connection, and what is known of that."""


class _Borrowed(PoolProxiedConnection):
    """A driver's connection that belongs to Django: SQLAlchemy neither commits nor rolls back nor closes it."""

    def __init__(self, driver: Any, info: dict[Any, Any]) -> None:
        """`info`: what SQLAlchemy keeps of a driver's connection, as long as Django has it open."""
        self.dbapi_connection = self.driver_connection = driver
        self._is_valid = True
        self._info = info

    @property
    def info(self) -> dict[Any, Any]:
        return self._info

    @property
    def is_valid(self) -> bool:
        return self._is_valid

    @property
    def is_detached(self) -> bool:
        return False

    @property
    def record_info(self) -> None:
        return None

    def invalidate(self, e: BaseException | None = None, soft: bool = False) -> None:
        self._is_valid = False  # Django notices itself that its connection is lost

    def commit(self) -> None:
        return

    def rollback(self) -> None:
        return

    def close(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dbapi_connection, name)


class DjangoEngine:
    """Lends one of Django's databases to SQLAlchemy."""

    def __init__(self, using: str) -> None:
        """`using`: the alias of the database. Raises BindingRefused if Notify does not know its driver."""
        wrapper = db.connections[using]
        module = getattr(wrapper, "Database", None)
        driver = getattr(module, "__name__", "none").partition(".")[0]
        dialect = DIALECTS.get(driver)
        if dialect is None:
            raise BindingRefused(
                f"the database {using!r} has the engine {wrapper.settings_dict['ENGINE']!r} (driver {driver}), which "
                "cannot carry messages; use PostgreSQL, MariaDB, MySQL or SQLite with Django's own backends, or "
                "backends that build on them"
            )
        self.using = using
        # Looking for PostgreSQL's hstore extension, which no statement here needs, would cost a query.
        options: dict[str, Any] = {"use_native_hstore": False} if dialect.startswith("postgresql") else {}
        # No pool: Django's settings bound the connections of a process, and these are needed only now and then.
        creator = functools.partial(_connect, using)
        self.engine = sa.create_engine(f"{dialect}://", creator=creator, poolclass=NullPool, **options)
        if dialect == "sqlite":
            use_explicit_begin(self.engine)
        # An engine without listeners, for borrowed connections, whose transactions it must not begin or end.
        self._borrowing = sa.create_engine(f"{dialect}://", creator=creator, poolclass=NullPool, **options)
        self._lock = threading.Lock()
        self._knows_server = False

    def borrow_in_place(self, wrapper: Any) -> sa.Connection:
        """`borrow`, after Django has set what it sets before a statement of its own: django-tenants sets the
        search_path only when a cursor is made."""
        wrapper.cursor().close()
        return self.borrow(wrapper)

    def borrow(self, wrapper: Any) -> sa.Connection:
        """A SQLAlchemy connection over Django's open connection, within Django's current transaction.

        Use it only within this transaction. Closing it is optional, and leaves Django's connection open.
        """
        driver, info = getattr(wrapper, _INFO, (None, {}))
        if driver is not wrapper.connection:
            setattr(wrapper, _INFO, (wrapper.connection, info := {}))
        connection = sa.Connection(self._borrowing, connection=_Borrowed(wrapper.connection, info))
        if not self._knows_server:
            with self._lock:
                if not self._knows_server:
                    # SQLAlchemy detects the server's version on the first connection that it opens; here it opens none.
                    self._borrowing.dialect.initialize(connection)
                    self._knows_server = True
        return connection


@functools.cache
def django_engine_of(using: str) -> DjangoEngine:
    """The process's DjangoEngine of a database. Raises BindingRefused if Notify does not know its driver.

    It connects at its first use, when Django's tests have replaced the name of the alias's database by their own.
    """
    return DjangoEngine(using)


def _connect(using: str) -> Any:
    """A new connection of the driver, made as Django makes one: with its options, role, time zone and signals."""
    wrapper = db.connections[using]
    settings = {**wrapper.settings_dict, "OPTIONS": {**wrapper.settings_dict["OPTIONS"]}}
    settings["OPTIONS"].pop("pool", None)  # a connection from Django's pool could not be returned to it
    if wrapper.vendor == "sqlite":
        settings["OPTIONS"]["detect_types"] = 0  # SQLAlchemy itself converts values
    fresh = type(wrapper)(settings, using)
    try:
        fresh.connect()
        fresh.set_autocommit(False)
    except db.Error as error:
        raise error.__cause__ or error from None  # the driver's error, which SQLAlchemy knows
    return fresh.connection


@contextlib.contextmanager
def django_errors(wrapper: Any) -> Iterator[None]:
    """Raise errors of the database as Django's errors, so that code that handles deadlocks or lost connections works
    here too."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        with wrapper.wrap_database_errors:
            raise error.orig or error from error
