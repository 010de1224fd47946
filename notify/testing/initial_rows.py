"""The rows of a database at the beginning of an exploration, which are written again for each run.

They come back as they were, whatever the tables are: PostgreSQL gives and takes values as text, columns that the
database computes are left to it, and neither triggers nor references to rows that are not there yet keep a row out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

_PRESENT = sa.text(
    "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND c.relpersistence <> 't' "
    "AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT') "
    "AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e' "
    "AND d.classid = 'pg_catalog.pg_class'::regclass)"
)
"""The tables of PostgreSQL that have rows of their own: no partitioned ones, whose partitions have the rows, and none
of extensions."""
_TRIGGERED = {
    "mysql": sa.text(
        "SELECT DISTINCT event_object_table FROM information_schema.triggers WHERE trigger_schema = DATABASE()"
    ),
    "sqlite": sa.text("SELECT DISTINCT tbl_name FROM sqlite_master WHERE type = 'trigger'"),
}
_COLUMNS = {
    "postgresql": sa.text(
        "SELECT a.attname FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = :schema AND c.relname = :name "
        "AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum"
    ),
    "mysql": sa.text(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = :name "
        "AND COALESCE(generation_expression, '') = '' ORDER BY ordinal_position"
    ),
    "sqlite": sa.text("SELECT name FROM pragma_table_xinfo(:name) WHERE hidden = 0 ORDER BY cid"),
}
"""The columns of a table that the database does not compute. SQLAlchemy's inspector warns of types unknown to it."""


@dataclass(frozen=True)
class _Table:
    name: str
    """Quoted, with its schema."""
    columns: tuple[str, ...]
    """Quoted, without those that the database computes."""
    rows: list[tuple[Any, ...]]


class InitialRows:
    """The rows that the tables of a database have when this is made."""

    def __init__(self, connection: sa.Connection) -> None:
        self._kind = _kind(connection)
        with _any_row(connection):
            self._tables = [self._read(connection, schema, name) for schema, name in self._names(connection)]

    def write(self, connection: sa.Connection) -> None:
        """Delete all rows of these tables, and write those of the beginning."""
        with _any_row(connection):
            for table in reversed(self._tables):
                self._empty(connection, table)
            for table in self._tables:
                if self._kind != "postgresql":
                    self._empty(connection, table)  # of what the triggers of tables before it have written
                if table.rows:
                    overriding = " OVERRIDING SYSTEM VALUE" if self._kind == "postgresql" else ""
                    mark = "?" if self._kind == "sqlite" else "%s"
                    marks = ", ".join([mark] * len(table.columns))
                    statement = f"INSERT INTO {table.name} ({', '.join(table.columns)}){overriding} VALUES ({marks})"
                    connection.exec_driver_sql(statement, table.rows)

    def _empty(self, connection: sa.Connection, table: _Table) -> None:
        connection.exec_driver_sql(f"DELETE FROM {self._only(table.name)}")

    def _only(self, name: str) -> str:
        """A table without those that inherit from it."""
        return f"ONLY {name}" if self._kind == "postgresql" else name

    def _names(self, connection: sa.Connection) -> list[tuple[str | None, str]]:
        """The tables. On PostgreSQL those come first to which others refer, in other databases those with triggers."""
        inspector = sa.inspect(connection)
        if self._kind == "postgresql":
            present = {tuple(row) for row in connection.execute(_PRESENT)}
            schemas = [name for name in inspector.get_schema_names() if name != "information_schema"]
            return [
                (schema, name)
                for schema in schemas
                for name, _ in inspector.get_sorted_table_and_fkc_names(schema)
                if name is not None and (schema, name) in present
            ]
        triggered = set(connection.scalars(_TRIGGERED[self._kind]))
        return [(None, name) for name in sorted(inspector.get_table_names(), key=lambda name: name not in triggered)]

    def _read(self, connection: sa.Connection, schema: str | None, name: str) -> _Table:
        quote = connection.dialect.identifier_preparer.quote_identifier
        table = quote(name) if schema is None else f"{quote(schema)}.{quote(name)}"
        found = connection.execute(_COLUMNS[self._kind], {"schema": schema, "name": name})
        columns = tuple(quote(column) for column in found.scalars())
        if not columns:  # PostgreSQL has such tables
            return _Table(table, columns, [])
        read = [f"CAST({column} AS text)" for column in columns] if self._kind == "postgresql" else columns
        rows = connection.exec_driver_sql(f"SELECT {', '.join(read)} FROM {self._only(table)}")
        return _Table(table, columns, [tuple(row) for row in rows])


@contextlib.contextmanager
def _any_row(connection: sa.Connection) -> Iterator[None]:
    """Within this context every row may be written that was read: no reference keeps it out, MySQL does not number a
    zero, and no hour comes twice. Only a superuser of PostgreSQL may turn off references and triggers."""
    kind = _kind(connection)
    if kind == "postgresql":
        with contextlib.suppress(sa.exc.DBAPIError), connection.begin_nested():
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
    if kind != "mysql":
        yield
        return
    before = connection.exec_driver_sql("SELECT @@foreign_key_checks, @@sql_mode, @@time_zone").one()
    setting = "SET SESSION foreign_key_checks = %s, sql_mode = %s, time_zone = %s"
    connection.exec_driver_sql(setting, (0, "NO_AUTO_VALUE_ON_ZERO", "+00:00"))
    try:
        yield
    finally:
        connection.exec_driver_sql(setting, tuple(before))


def _kind(connection: sa.Connection) -> str:
    name = connection.dialect.name
    return "mysql" if name == "mariadb" else name
