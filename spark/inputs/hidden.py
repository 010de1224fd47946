"""Finds what a database hides from its user: columns that it may not read, and rows that policies leave out.

Such a column counts neither as missing nor as empty. PostgreSQL, MySQL and MariaDB grant SELECT on single columns, and
MySQL and MariaDB do not even list the others.

Row level security of PostgreSQL is not in the plan of a query: a policy that allows nothing leaves no table in it, a
view reads with its owner's rights, and a function has a plan of its own. With `row_security = off` the server itself
refuses a query from which a policy may hide rows. Which tables and views it then was about is known by the locks that
the query takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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


_REFUSED = "42501"
"""The SQLSTATE for a query that lacks a right, or that a policy would change."""
_LOCKED = "SELECT DISTINCT relation FROM pg_catalog.pg_locks WHERE pid = pg_catalog.pg_backend_pid() AND relation > 0"
_POLICIES = """
WITH roles AS (
  SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user
  UNION SELECT c.relowner FROM pg_catalog.pg_class c WHERE c.oid IN :locked AND c.relkind = 'v'
    AND NOT EXISTS (SELECT 1 FROM unnest(c.reloptions) o WHERE o IN ('security_invoker=true', 'security_invoker=on'))
  UNION SELECT p.proowner FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE :in_functions AND p.prosecdef AND n.nspname NOT IN ('pg_catalog', 'information_schema'))
SELECT n.nspname, c.relname, r.rolname, r.rolname = current_user,
  EXISTS (SELECT 1 FROM policies p WHERE p.permissive AND p.is_true)
    AND NOT EXISTS (SELECT 1 FROM policies p WHERE NOT p.permissive AND NOT p.is_true)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles r ON r.oid IN (SELECT oid FROM roles)
WHERE c.oid IN :locked AND c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
  AND (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE'))
ORDER BY 1, 2, 3
"""
_OF_TABLE = """(SELECT y.polpermissive AS permissive,
    coalesce(pg_catalog.pg_get_expr(y.polqual, y.polrelid) = 'true', false) AS is_true
  FROM pg_catalog.pg_policy y WHERE y.polrelid = c.oid AND y.polcmd IN ('*', 'r')
    AND (0 = ANY (y.polroles)
      OR EXISTS (SELECT 1 FROM unnest(y.polroles) g WHERE pg_catalog.pg_has_role(r.oid, g, 'USAGE'))))"""
_SEES = sa.text(_POLICIES.replace("FROM policies p", f"FROM {_OF_TABLE} p")).bindparams(
    sa.bindparam("locked", expanding=True)
)


def hidden_by_policies(connect: Callable[[], sa.Connection], query: str) -> Iterator[str]:
    """Why a query may not see all rows of what it reads, in sentences. `connect`: a connection with a transaction."""
    first = f"SELECT 1 FROM ({query}) q LIMIT 1"
    if not _is_refused(connect, first):
        return
    with connect() as connection:
        connection.exec_driver_sql(f"EXPLAIN {first}")
        planned = set(connection.exec_driver_sql(_LOCKED).scalars())
        connection.exec_driver_sql(first).all()
        locked = set(connection.exec_driver_sql(_LOCKED).scalars())
        given = {"locked": sorted(locked), "in_functions": locked != planned}
        secured = connection.execute(_SEES, given).all()
        connection.rollback()
    for schema, table, role, is_own, sees_all in secured:
        if sees_all:
            continue
        whose = f"the role {role}" if is_own else f"the role {role}, with whose rights a view or function reads it"
        yield (
            f"row level security may hide rows of the table {schema}.{table} from SELECT by {whose}, since no policy "
            "of this role is USING (true), or a restrictive one is not, so that none seen does not mean that there are "
            f"none: CREATE POLICY notify ON {schema}.{table} TO {role} USING (true), or ALTER ROLE {role} BYPASSRLS"
        )
    if not secured:
        yield (
            "row level security may hide rows from it, within a function that it calls, so that none seen does not "
            "mean that there are none: query the table of the effects itself"
        )


def _is_refused(connect: Callable[[], sa.Connection], query: str) -> bool:
    """Whether a policy may hide rows from a query that this role may make."""
    with connect() as connection:
        connection.exec_driver_sql("SET LOCAL row_security = off")
        try:
            connection.exec_driver_sql(query).all()
        except sa.exc.DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _REFUSED:
                raise
            return True
        finally:
            connection.rollback()
    return False
