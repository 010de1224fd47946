"""Schemas: where in a database Notify's tables are. The one rule by which every part finds them.

A table without a named schema is where the connection finds it: by its `schema_translate_map`, else by PostgreSQL's
search_path or MySQL's current database. A source is a schema: its half_message and its notify_source are in the same
one. A part that writes or asks finds the schema first, and names it in the statement.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.errors import InvalidRequest
from notify.runtime.databases import ALL_ROWS, is_gone, quoted

S = TypeVar("S", sa.Select[Any], sa.Delete)
Kind = Literal["table", "view", "foreign"]
"""The kinds that may stand in a table's place: a table, a view, or a foreign table, whose rows are another server's."""
_POSTGRESQL_FINDS = sa.text(
    "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.oid = pg_catalog.to_regclass(:name)"
)
_POSTGRESQL_ALL = (
    "SELECT n.nspname, CAST(c.relkind AS text) "
    "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relname = :name AND c.relkind IN ('r', 'p', 'v', 'f') AND n.nspname NOT LIKE 'pg\\_%' "
)
_POSTGRESQL_HAS = sa.text(f"{_POSTGRESQL_ALL} AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') ORDER BY 1")
_POSTGRESQL_HIDES = sa.text(f"{_POSTGRESQL_ALL} AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') ORDER BY 1")
_MYSQL_HAS = sa.text(
    "SELECT table_schema, table_type FROM information_schema.tables WHERE table_name = :name ORDER BY 1 "
    f"LIMIT {ALL_ROWS}"
)
_OTHER_KINDS: dict[str, Kind] = {"v": "view", "VIEW": "view", "f": "foreign"}
SQLITE = "main"
"""The name of the schema of SQLite's own file; attached files have others."""


def named_by(connection: Connection, schema: str | None = None) -> str:
    """`schema` if it is given, else the schema that the connection's `schema_translate_map` names for tables without
    one; "" if the database's own rule decides. Costs no statement."""
    if schema:
        return schema
    translated = connection.get_execution_options().get("schema_translate_map")
    if not translated or None not in translated:
        return ""
    # As SQLAlchemy translates the service's own tables.
    return str(translated[None] or connection.dialect.default_schema_name or "")


def found_in(connection: Connection, table: str, schema: str | None = None) -> str:
    """The schema in which this connection finds a table: `schema` if it is given, else that of its
    `schema_translate_map`, else what the database's own rule says.

    "" if PostgreSQL finds no such table, or MySQL has no current database. A named schema is not looked for.
    """
    if named := named_by(connection, schema):
        return named
    if connection.dialect.name == "postgresql":
        name = connection.dialect.identifier_preparer.quote(table)
        return text_of(connection.execute(_POSTGRESQL_FINDS, {"name": name}).scalar() or "")
    if connection.dialect.name == "sqlite":
        return SQLITE
    return text_of(connection.exec_driver_sql("SELECT DATABASE()").scalar() or "")


def with_table(connection: Connection, table: str, patterns: str = "*") -> list[str]:
    """The schemas that have a table, or what stands in its place, and whose names match one of the patterns
    (`t_*,public`, separated by commas), in the order of their names. On PostgreSQL only those that this role may use.
    """
    return list(kinds_of(connection, table, patterns))


def kinds_of(connection: Connection, table: str, patterns: str = "*") -> dict[str, Kind]:
    """The kind of the table in each schema of `with_table`."""
    found: dict[str, Kind]
    if connection.dialect.name == "sqlite":
        attached = [text_of(row[1]) for row in connection.exec_driver_sql("PRAGMA database_list")]
        found = {name: "table" for name in attached if sa.inspect(connection).has_table(table, schema=name)}
    else:
        statement = _POSTGRESQL_HAS if connection.dialect.name == "postgresql" else _MYSQL_HAS
        rows = connection.execute(statement, {"name": table})
        found = {text_of(name): _OTHER_KINDS.get(text_of(kind), "table") for name, kind in rows}
    check_patterns(patterns)
    return {name: kind for name, kind in found.items() if matches(name, patterns)}


def hidden_with_table(connection: Connection, table: str, patterns: str = "*") -> list[str]:
    """The schemas that `with_table` leaves out because this role may not use them. Only PostgreSQL tells."""
    if connection.dialect.name != "postgresql":
        return []
    rows = connection.execute(_POSTGRESQL_HIDES, {"name": table})
    return [name for row in rows if matches(name := text_of(row[0]), patterns)]


def check_choice(schema: str | None, patterns: str | None) -> None:
    """Raises InvalidRequest if both a schema and patterns are given, or patterns without a name."""
    if schema and patterns:
        raise InvalidRequest("name one schema, or patterns of several, not both")
    if patterns is not None:
        check_patterns(patterns)


def check_patterns(patterns: str) -> None:
    """Raises InvalidRequest if there is no pattern among the commas."""
    if not patterns.replace(",", "").strip():
        raise InvalidRequest("name at least one schema, or a pattern such as 't_*'")


def matches(name: str, patterns: str) -> bool:
    """Whether a schema's name matches one of the patterns (`t_*,public`, separated by commas)."""
    return any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in patterns.split(","))


_DATABASE_KEY = "notify_database"
_ON_MYSQL = "SELECT CONCAT(@@hostname, ' ', @@port, ' ', @@server_id)"
_DATABASE = {
    "postgresql": (
        "SELECT pg_catalog.current_database() || ' ' || extract(epoch FROM pg_catalog.pg_postmaster_start_time())"
    ),
    "mysql": _ON_MYSQL,
    "mariadb": _ON_MYSQL,
}


def database_of(connection: Connection) -> str:
    """A text that tells a connection's database, or its MySQL or MariaDB server, from others to which the same engine
    may lead; "" for SQLite. It is asked once for each connection of the driver."""
    query = _DATABASE.get(connection.dialect.name)
    if query is None:
        return ""
    known: str | None = connection.info.get(_DATABASE_KEY)
    if known is None:
        connection.info[_DATABASE_KEY] = known = text_of(connection.exec_driver_sql(query).scalar_one())
    return known


def text_of(value: object) -> str:
    """A value of a catalogue as text; some drivers give its texts as bytes."""
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)


@functools.lru_cache(maxsize=10_000)
def within(table: sa.Table, schema: str | None) -> sa.Table:
    """A table in a schema: the same object for the same schema. None or "": the table as it is."""
    if not schema or table.schema == schema:
        return table
    return table.to_metadata(sa.MetaData(), schema=schema)


AT_ONCE = 100
"""The most schemas that one statement looks into."""


def holding(connection: Connection, conditions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The schemas in which a table has a row that meets its condition. `conditions`: SQL texts by schema and table.

    A schema into which this user cannot look counts as one of them: the part that works there learns why. It is found
    by halving the schemas, so that a table that is locked, dropped or not to be read hides no other.
    """
    schemas = list(conditions)
    found: list[str] = []
    for begin in range(0, len(schemas), AT_ONCE):
        found += _holding(connection, schemas[begin : begin + AT_ONCE], conditions)
    return found


def _holding(connection: Connection, schemas: Sequence[str], conditions: Mapping[str, Mapping[str, str]]) -> list[str]:
    # A text, since SQLAlchemy would take longer to build the statement than the database to answer it.
    from_nothing = " FROM DUAL" if connection.dialect.name in ("mysql", "mariadb") else ""
    selects = []
    for number, schema in enumerate(schemas):
        exist = [
            f"EXISTS (SELECT 1 FROM {quoted(connection, schema)}.{t} WHERE {text})"
            for t, text in conditions[schema].items()
        ]
        selects.append(f"SELECT {number}{from_nothing} WHERE {' OR '.join(exist)}")
    statement = sa.text(" UNION ALL ".join(selects).replace(":", r"\:"))
    try:
        return [schemas[number] for number in connection.scalars(statement)]
    except sa.exc.DBAPIError as error:
        if error.connection_invalidated or is_gone(error.orig):
            raise
        if len(schemas) == 1:
            return list(schemas)
        half = len(schemas) // 2
        return _holding(connection, schemas[:half], conditions) + _holding(connection, schemas[half:], conditions)


def qualified(connection: Connection, table: str, schema: str | None) -> str:
    """A table's name within its schema, quoted for `sa.text`; without a schema, the name as it is."""
    return f"{quoted(connection, schema)}.{table}".replace(":", "\\:") if schema else table


def by_key(statement: S, table: sa.Table) -> S:
    """A statement that locks or deletes rows by many values of a table's primary key. MySQL would look at the whole
    table, and wait there for rows that others have not committed: a hint names the key."""
    return statement.prefix_with(f"/*+ INDEX({table.name} PRIMARY) */", dialect="mysql")


def as_text(connection: Connection, table: str, schema: str | None) -> str:
    """A table's name, qualified, as a text of PostgreSQL's SQL for `sa.text`. Where a session has no
    standard_conforming_strings, a backslash in a name would escape what follows; within E'…' it is doubled in any."""
    name = f"{quoted(connection, schema)}.{table}" if schema else table
    escaped = name.replace("\\", "\\\\").replace("'", "''").replace(":", "\\:")
    return f"E'{escaped}'"


def in_schema(schema: str | None) -> dict[str, dict[str | None, str]]:
    """The execution options with which a statement or a connection names this schema in every table of Notify.

    Without a schema, tables are named as they are, whatever the connection's own `schema_translate_map` says.
    """
    return {"schema_translate_map": {None: schema} if schema else {}}


@contextmanager
def naming(connection: Connection, schema: str | None) -> Iterator[Connection]:
    """Within the block, the connection's statements on Notify's tables name this schema. Statements as text do not."""
    before = connection.get_execution_options().get("schema_translate_map")
    connection.execution_options(**in_schema(schema))
    try:
        yield connection
    finally:
        connection.execution_options(schema_translate_map=before)
