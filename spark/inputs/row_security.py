"""Row level security of PostgreSQL, as it holds for a query of the user's: which rows the query may leave out.

The plan of a query does not show it: a policy that allows nothing leaves no table in it, a view reads with its owner's
rights, and a function has a plan of its own. With `row_security = off` the server itself refuses a query from which a
policy may hide rows. Which tables and views it then was about is known by the locks that the query takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sqlalchemy as sa

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
