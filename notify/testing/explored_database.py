"""The database of an exploration: as it was before the act, for each run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.client.tables.definitions import half_message, is_waiting
from notify.errors import InvalidRequest
from notify.runtime.databases import has_table, use_explicit_begin
from notify.runtime.schemas import in_schema, with_table
from notify.testing.hooks import HOOKS
from notify.testing.initial_rows import InitialRows

DJANGO = "django:"
"""Before the alias of a database of Django's, in place of a URL."""

Rows = str | Callable[[sa.Connection], Iterable[Any]]
"""A query in SQL, or a function that gets a connection and returns the rows' values."""


def engine_of(database: str) -> sa.Engine:
    """A new engine of an explored database, for the service. Raises InvalidRequest for a database of Django's that only
    one thread can use."""
    if database.startswith(DJANGO):
        from notify.testing.django_steps import engine_of_alias

        return engine_of_alias(database.removeprefix(DJANGO))
    engine = sa.create_engine(_blocking(database))
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    return engine


_DRIVERS = {"postgresql": "+psycopg", "mysql": "+pymysql", "mariadb": "+pymysql"}
"""The drivers that the extras of Notify bring."""


def _blocking(database: str) -> sa.URL:
    """A database's URL; one with a driver for asyncio gets a driver that blocks."""
    url = sa.make_url(database)
    if not url.get_dialect().is_async:
        return url
    kind = url.get_backend_name()
    return url.set(drivername=kind + _DRIVERS.get(kind, ""))


def given_database(database: object) -> str | None:
    """The database that a test gives to `explore`. Raises InvalidRequest for one that the processes of a service cannot
    share."""
    if isinstance(database, sa.URL):
        database = database.render_as_string(hide_password=False)
    if database is None or (isinstance(database, str) and database.startswith(DJANGO)):
        return database
    if not isinstance(database, str):
        raise InvalidRequest(f"database is a {type(database).__name__}: give the SQLAlchemy URL of a database")
    url = sa.make_url(database)
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidRequest(
            "this database of SQLite is in memory, where the processes of a service cannot meet: leave database= out, "
            "or name a file"
        )
    return database


_COLON = re.compile(r"(?<!\\):")
"""A colon for SQLAlchemy to leave as it is: a query has no parameters."""


class ExploredDatabase:
    """A database that holds the same rows at the beginning of each run.

    Without a URL each run gets a file of SQLite of its own, a copy of the first. In any other database all rows of all
    tables are deleted, and those of the beginning are written again.
    """

    def __init__(self, url: str | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="notify-explored-")
        self._given = url
        self._first = Path(self._directory.name, "first.db")
        self._runs = 0
        self._rows: InitialRows | None = None
        self.url = url or f"sqlite:///{self._first}"

    def remember(self) -> None:
        """Remember what the database holds as the beginning of each run."""
        if self._given is None:
            self._first.touch()  # a service that makes no tables
            return
        with self._engine().connect() as connection:
            self._rows = InitialRows(connection)

    def restore(self) -> None:
        """Begin a run."""
        if self._given is None:
            self._runs += 1
            copy = Path(self._directory.name, f"{self._runs}.db")
            shutil.copyfile(self._first, copy)
            self.url = f"sqlite:///{copy}"
            return
        if self._rows is not None:
            with self._engine().begin() as connection:
                self._rows.write(connection)

    def count(self, rows: Rows) -> Counter[Any]:
        """How often a query returns each row; a row of one column counts as its value."""
        with self._reading() as connection:
            if not isinstance(rows, str):
                return Counter(map(_countable, rows(connection)))
            found = connection.execute(sa.text(_COLON.sub(r"\\:", rows)))
            return Counter(_countable(row[0] if len(row) == 1 else tuple(row)) for row in found)

    def committed(self) -> set[str]:
        """The ids of the messages of committed transactions, by their rows in half_message."""
        columns = half_message.c
        query = sa.select(columns.transaction_id, columns.message_no).where(columns.state == "COMMITTED")
        return {f"{transaction_id}.{number}" for transaction_id, number in self._of_outboxes(query)}

    def waiting(self) -> int:
        """How many rows of the outbox wait for a relay."""
        query = sa.select(sa.func.count()).select_from(half_message).where(is_waiting)
        return sum(number for (number,) in self._of_outboxes(query))

    def has_delayed(self) -> bool:
        """Whether the row of a message names an instant before which it is not delivered."""
        delayed = sa.or_(half_message.c.delay.is_not(None), half_message.c.deliver_at.is_not(None))
        query = sa.select(sa.func.count()).select_from(half_message).where(delayed)
        return any(number for (number,) in self._of_outboxes(query))

    def topics(self) -> set[str]:
        """The topics of all messages that have rows."""
        return {topic for (topic,) in self._of_outboxes(sa.select(half_message.c.topic).distinct())}

    def _of_outboxes(self, query: sa.Select[Any]) -> list[Any]:
        """The rows of a query on half_message, in all schemas that have one. A schema of MySQL is a database."""
        with self._reading() as connection:
            schemas: list[str | None] = [None] if has_table(connection, half_message.name) else []
            if connection.dialect.name == "postgresql":
                schemas = [*with_table(connection, half_message.name)]
            return [row for name in schemas for row in connection.execute(query, execution_options=in_schema(name))]

    def close(self) -> None:
        """Leave the database as it was before the first run."""
        if self._rows is not None:
            self.restore()
        self._directory.cleanup()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        """A connection without a transaction, which would keep the service's writers out of a file of SQLite."""
        with self._engine().connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def _engine(self) -> sa.Engine:
        """An engine whose connections are closed when they are given back."""
        is_djangos = self.url.startswith(DJANGO)
        engine = engine_of(self.url) if is_djangos else sa.create_engine(_blocking(self.url), poolclass=sa.NullPool)
        HOOKS.leave_out(engine)
        return engine


def _countable(row: Any) -> Any:
    """A row as it is, or the JSON of one that has lists or objects, which cannot be counted."""
    try:
        hash(row)
    except TypeError:
        return json.dumps(row, sort_keys=True, default=str)
    return row
