"""Columns that a database's user may not read: they count neither as missing nor as empty.

PostgreSQL, MySQL and MariaDB grant SELECT on single columns. MySQL and MariaDB do not even list the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sqlalchemy as sa

from notify.client.tables.definitions import half_message
from notify.storage.sql.tables import server_half_message

SPARED = {table.name: frozenset({"body", "headers"}) for table in (half_message, server_half_message)}
"""Columns that an audit does not read, since they may hold personal data: only plans and `explain` show them."""
_NOT_READABLE = sa.text("""
SELECT c.relname, a.attname FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
WHERE n.nspname = :schema AND c.relname IN :tables AND a.attnum > 0 AND NOT a.attisdropped
  AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')
""").bindparams(sa.bindparam("tables", expanding=True))
_DENIED = (1142, 1143)
"""The errors of MySQL for a table and for a column. A column that is not there has another one."""


def unreadable(
    connection: sa.Connection, kind: str, schema: str, tables: Sequence[sa.Table], in_schema: Callable[[str], str]
) -> dict[str, frozenset[str]]:
    """The columns of Notify's that this user may not read, by table, without tables of which it may read all.

    `tables`: those that are there. `in_schema`: a table's name in SQL.
    """
    if kind == "postgresql" and tables:
        asked = {"schema": schema, "tables": [table.name for table in tables]}
        denied = {(str(table), str(column)) for table, column in connection.execute(_NOT_READABLE, asked)}
        found = {
            table.name: frozenset(column.name for column in table.c if (table.name, column.name) in denied)
            for table in tables
        }
    elif kind == "mysql":
        quote = connection.dialect.identifier_preparer.quote_identifier
        found = {
            table.name: frozenset(
                column.name for column in table.c if _is_denied(connection, quote(column.name), in_schema(table.name))
            )
            for table in tables
            if not _is_readable(connection, in_schema(table.name))
        }
    else:
        found = {}
    return {name: columns for name, columns in found.items() if columns}


def hidden_by_grants(
    connection: sa.Connection, kind: str, denied: dict[str, frozenset[str]], in_schema: Callable[[str], str]
) -> list[str]:
    """Sentences about those of these columns that every audit reads, and what to do."""
    sentences = []
    for table, columns in sorted(denied.items()):
        if needed := sorted(columns - SPARED.get(table, frozenset())):
            user = connection.exec_driver_sql("SELECT current_user").scalar()
            role = str(user) if kind == "postgresql" else "@".join(f"'{part}'" for part in str(user).rsplit("@", 1))
            sentences.append(
                f"the user {user} may not read {', '.join(needed)} of the table {table}, so that none seen does not "
                f"mean that there are none: GRANT SELECT ON {in_schema(table)} TO {role}"
            )
    return sentences


def _is_readable(connection: sa.Connection, table: str) -> bool:
    """Whether the user has SELECT on a whole table, or on all of its columns."""
    return not _is_denied(connection, "*", table)


def _is_denied(connection: sa.Connection, column: str, table: str) -> bool:
    try:
        connection.exec_driver_sql(f"SELECT {column} FROM {table} LIMIT 0")
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "args", (0,))[0] in _DENIED:
            return True
        if column == "*":
            raise
    return False
