"""Places: the schemas that one producer's rows go to. They find the schema of a transaction before its half is stored.

A schema that `schema=` or a `schema_translate_map` names is known without asking. Otherwise the database decides, by
its search_path or current database, which the service may change for each transaction. Then the place of the last
transaction is a guess, which costs nothing, and the INSERT of the row (half_rows.py) goes nowhere if it is wrong. Where
guesses were wrong lately, the database is asked first.

The connections of one engine may lead to several databases, in which the schema, and even the table's number, is the
same. So each connection is asked once where it leads, and what was met in one database counts for no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, NoSuchTableError, OperationalError, ProgrammingError

from notify.check.listener import CheckUnavailable
from notify.check.question import read_source
from notify.check.sources import Sources
from notify.client.tables.background_connections import note_connected
from notify.client.tables.definitions import MAKE_TABLES, columns_of, half_message, notify_source
from notify.errors import BindingRefused, InvalidRequest, NotifyError, TransactionRefused
from notify.runtime.databases import (
    is_column_missing,
    is_database_missing,
    is_table_missing,
    is_unstorable,
    quoted,
    reason_of,
)
from notify.runtime.guarantees import Need, pool_of, verify
from notify.runtime.schemas import SQLITE, as_text, database_of, found_in, named_by

ASK_FIRST = 100
"""After a wrong guess, how many transactions in one place must follow before a place is guessed again."""
MOST = 10_000
"""The most places that are remembered; then all are read again."""


@dataclass(slots=True, frozen=True)
class Place:
    """A schema with Notify's tables, as the transactions of one producer use it.

    `is_named`: whether statements name the schema, so that the session's settings cannot lead elsewhere. `table`: on
    PostgreSQL, the object id of half_message.
    """

    schema: str
    source: str
    is_named: bool
    has_digest: bool
    table: int = 0


def name_in_text(connection: Connection, place: Place) -> str:
    """The name of half_message as the statements of a transaction in a place write it, as a text of PostgreSQL's
    SQL."""
    return as_text(connection, half_message.name, place.schema if place.is_named else None)


class Places:
    """The places of one producer's transactions. Any thread may use them."""

    def __init__(
        self, sources: Sources, needs: tuple[Need, ...], make_tables: str = MAKE_TABLES, make_in: str = ""
    ) -> None:
        """`sources`: gets the source of each place. `needs`: what is verified of each. `make_tables`: the part of an
        error text that says how to create the tables; `make_in`: the same for a schema, which is put in place of `{}`.
        """
        self._sources = sources
        self._make_tables = make_tables
        self._make_in = make_in or "call notify.client.create_tables(engine, schema={})"
        self._known: dict[tuple[object, ...], Place] = {}
        self._last: dict[str, Place] = {}
        """The place of the last transaction in each database."""
        self._asks = 0
        """How many transactions are still to ask first."""
        self._needs = needs
        self._guesses = True
        """Whether the place of a transaction may be guessed."""
        self._pool: tuple[Any, float] = (None, 0.0)
        self._changes = 0

    def of(self, connection: Connection) -> Place:
        """The place of a transaction: named, guessed, or asked for. Raises BindingRefused if it lacks tables."""
        pool, changes = pool_of(connection), self._sources.changes
        # A new pool, or connections that the database has ended, may lead to another server; and a look may have found
        # that a schema was recreated.
        if pool != self._pool or changes != self._changes:
            self._pool, self._changes = pool, changes
            self._known, self._last = {}, {}
        named = named_by(connection, self._sources.schema)
        if not named and connection.dialect.name == "sqlite":
            named = found_in(connection, half_message.name)
        database = database_of(connection)
        if named:
            return self._known.get((database, named)) or self._meet(connection, (database, named), named)
        last = self._last.get(database)
        return self._ask(connection) if last is None or self._asks or not self._guesses else last

    def again(self, connection: Connection, wrong: Place) -> Place:
        """The place of a transaction whose row did not go to `wrong`. Raises BindingRefused if it lacks tables."""
        if wrong.is_named:
            return self._meet(connection, (database_of(connection), wrong.schema), wrong.schema)
        self._asks = ASK_FIRST
        place = self._ask(connection)
        if place is not wrong:
            return place
        self._known = {key: place for key, place in self._known.items() if place is not wrong}
        return self._ask(connection)  # its source id has changed

    def wrong_table(self, error: DBAPIError) -> NotifyError | None:
        """The error for a transaction whose row found no table where it was guessed to be, or an older one without a
        column, and from now on no place is guessed; or whose row the table cannot hold. None for other errors.

        On PostgreSQL the transaction can do nothing more, not even ask.
        """
        if is_table_missing(error.orig):
            self._guesses = False
            return self._no_table("where this transaction is, the connection", half_message.name, None)
        if is_unstorable(error.orig):
            return unstorable(error)
        if half_message.c.digest.name not in str(error.orig) or not is_column_missing(error.orig):
            return None
        self._guesses = False
        self._known, self._last = {}, {}  # the same table may have lost the column
        refused = TransactionRefused(
            "nothing is committed: this transaction's schema has the half_message of an older version, unlike the one "
            "before: repeat the transaction, or call create_tables for every schema"
        )
        refused.retryable = True
        return refused

    # --- asking -----------------------------------------------------------------------------------------------

    def _ask(self, connection: Connection) -> Place:
        database = database_of(connection)
        if connection.dialect.name == "postgresql":
            key: tuple[object, ...] = (database, connection.execute(_TABLE).scalar())
        else:
            key = (database, "", found_in(connection, half_message.name))
        place = self._known.get(key) or self._meet(connection, key, None)
        last = self._last.get(database)
        if place is last:
            self._asks = max(0, self._asks - 1)
        elif last is not None:
            self._asks = ASK_FIRST
        self._last[database] = place
        return place

    def _meet(self, connection: Connection, key: tuple[object, ...], schema: str | None) -> Place:
        """Read a schema for the first time, and note its source. The one point where a producer meets a schema, also
        after its engine has got a new pool: whatever has to be verified once belongs here.

        `schema`: None: as the connection finds it. Raises UnsafeTable, too.
        """
        note_connected(connection)
        verify(connection, self._needs, schema)
        if connection.dialect.name == "postgresql":
            place = self._meet_postgresql(connection, schema)
        else:
            found = schema or found_in(connection, half_message.name)
            if not found:
                raise self._no_table("the connection has no current database, so that it", half_message.name, None)
            try:
                has_digest = half_message.c.digest.name in columns_of(connection, half_message, found)
            except (NoSuchTableError, OperationalError) as error:
                if isinstance(error, OperationalError) and not is_database_missing(error.orig):
                    raise
                raise self._no_table(self._where(schema), half_message.name, schema) from None
            source = self._read_source(connection, found, schema)
            place = Place(found, source, bool(schema), has_digest)
        self._sources.note(place.schema, place.source, database_of(connection))
        if len(self._known) >= MOST:
            self._known, self._last = {}, {}
        self._known[key] = place
        return place

    def _meet_postgresql(self, connection: Connection, schema: str | None) -> Place:
        before = f"{quoted(connection, schema)}." if schema else ""
        names = {"half": before + half_message.name, "source": before + notify_source.name}
        row = connection.execute(_MEETING, names).one()
        if row.half is None:
            raise self._no_table(self._where(schema), half_message.name, schema)
        if row.source != row.own_source or row.source is None:
            elsewhere = f"; that of {row.source_schema!r} is another source" if row.source_schema else ""
            raise self._no_table(
                f"the schema {row.half_schema!r} has half_message, but{elsewhere}",
                notify_source.name,
                row.half_schema,
            )
        source = self._read_source(connection, row.half_schema, schema)
        return Place(row.half_schema, source, bool(schema), bool(row.has_digest), row.half)

    def _read_source(self, connection: Connection, found: str, schema: str | None) -> str:
        try:
            return read_source(connection, found)[0]
        except CheckUnavailable as error:
            raise BindingRefused(f"nothing is committed: {error}") from None
        except (ProgrammingError, OperationalError) as error:
            if not is_table_missing(error.orig):
                raise
            raise self._no_table(self._where(schema), notify_source.name, schema) from error

    @staticmethod
    def _where(schema: str | None) -> str:
        return f"the schema {schema!r}" if schema and schema != SQLITE else "the database"

    def _no_table(self, where: str, table: str, schema: str | None) -> BindingRefused:
        remedy = self._make_in.format(repr(schema)) if schema and schema != SQLITE else self._make_tables
        return BindingRefused(f"nothing is committed: {where} has no table {table}; {remedy}")


def unstorable(error: Exception) -> InvalidRequest:
    """The error for a message that the database, or its driver, cannot store."""
    return InvalidRequest(
        f"nothing is committed: the database cannot store the message as it is: {reason_of(error)}; the connection "
        "needs an encoding with all characters (charset=utf8mb4 in the URL of MySQL and MariaDB), half_message the "
        "column types that create_tables gives it, and a key has no NUL in PostgreSQL"
    )


_TABLE = sa.text("SELECT CAST(pg_catalog.to_regclass('half_message') AS oid)")
"""Tells on PostgreSQL where a session is, by its half_message."""
_MEETING = sa.text(
    "SELECT h.oid AS half, hn.nspname AS half_schema, s.oid AS source, sn.nspname AS source_schema, "
    "(SELECT o.oid FROM pg_catalog.pg_class o WHERE o.relname = 'notify_source' AND o.relnamespace = h.relnamespace) "
    "AS own_source, "
    "EXISTS (SELECT FROM pg_catalog.pg_attribute a "
    "WHERE a.attrelid = h.oid AND a.attname = 'digest' AND NOT a.attisdropped) AS has_digest "
    "FROM (SELECT pg_catalog.to_regclass(:half) AS half, pg_catalog.to_regclass(:source) AS source) AS found "
    "LEFT JOIN pg_catalog.pg_class h ON h.oid = found.half "
    "LEFT JOIN pg_catalog.pg_namespace hn ON hn.oid = h.relnamespace "
    "LEFT JOIN pg_catalog.pg_class s ON s.oid = found.source "
    "LEFT JOIN pg_catalog.pg_namespace sn ON sn.oid = s.relnamespace"
)
