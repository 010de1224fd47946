"""The rights of a source's user, tried on the server itself, because a grant may cover one scope or one role only.

It also lists the errors of a server that last until an operator acts, and what to do about each.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import pymysql
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.client.tables.definitions import notify_refused
from notify.movers.outbox import OUTBOXES
from notify.runtime.databases import has_table
from notify.storage.sql.checkup import Finding, is_mariadb
from notify.storage.sql.tables import server_member

_NO_SUCH_STATEMENT, _MAY_NOT = 1064, 1227
_TABLE_DENIED = (1142, 1143)
_TLS_MISMATCH = 2026

_DENIED = {
    1044: "its user has no right to this database: GRANT SELECT, UPDATE ON the database to it, or correct the name",
    1045: "the user or the password is wrong, or the user must connect with TLS: correct the address",
    1049: "there is no such database: correct the address",
    1129: "the server has blocked this host after too many errors: FLUSH HOSTS (MySQL: TRUNCATE TABLE "
    "performance_schema.host_cache)",
    1130: "the server accepts no user from this host: CREATE USER for it, and grant its rights",
    1142: "its user lacks a right to a table: grant it",
    1143: "its user lacks a right to a column: grant it",
    1227: "its user may not read the binlog: GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO it",
    1251: "the driver cannot log this user in: ALTER USER … IDENTIFIED WITH caching_sha2_password BY …",
    1524: "the server has not loaded the plugin by which this user logs in: INSTALL PLUGIN, or ALTER USER … IDENTIFIED "
    "BY …",
    1698: "the user cannot log in with a password: ALTER USER … IDENTIFIED BY …",
    1820: "the user's password has expired: ALTER USER … IDENTIFIED BY …",
    1862: "the user's password has expired: ALTER USER … IDENTIFIED BY …",
    2026: "the server and the address disagree about TLS: correct the options ssl_… of the address",
    2059: "the driver cannot log this user in: ALTER USER … IDENTIFIED WITH caching_sha2_password BY …",
    3118: "the user is locked: ALTER USER … ACCOUNT UNLOCK",
    3159: "the server takes no connection without TLS: append ?ssl_ca=FILE to the address",
    4151: "the user is locked: ALTER USER … ACCOUNT UNLOCK",
}
"""Errors of MySQL, MariaDB and the driver that last until an operator changes something, with what to do."""

_GRANT_ON_ALL = re.compile(r"GRANT (.+?) ON \*\.\* TO ", re.IGNORECASE)
_READS_BINLOG = {"REPLICATION SLAVE", "REPLICATION REPLICA", "ALL PRIVILEGES", "ALL"}


def denied(error: BaseException | None) -> str | None:
    """The remedy for a driver's error that waiting does not fix, with the error itself; None for any other error."""
    arguments: tuple[Any, ...] = getattr(error, "args", ())
    code = arguments[0] if arguments else None
    remedy = _DENIED.get(code) if isinstance(code, int) else None
    if remedy is None and isinstance(getattr(error, "original_exception", None), ssl.SSLCertVerificationError):
        remedy = _DENIED[_TLS_MISMATCH]
    if remedy is None and isinstance(error, RuntimeError) and "package is required" in str(error):
        return f"the user's kind of login needs a Python package: {error}"
    return f"{remedy} ({arguments[1] if len(arguments) > 1 else error})" if remedy is not None else None


def denied_by(code: int, text: str) -> str | None:
    """`denied` for an error that the server sent on a connection for its binlog."""
    return denied(pymysql.OperationalError(code, text))


def findings(connection: Connection, schemas: Sequence[str] = ("",)) -> list[Finding]:
    """Findings about rights that the connection's user lacks. `schemas`: those with the tables; "": the connection's
    own database."""
    found = _binlog_findings(connection)
    for schema in schemas:
        found += _table_findings(connection, schema)
    return found


def is_refusal(error: sa.exc.DBAPIError) -> bool:
    """Whether the user lacks a right of the whole server."""
    return code_of(error) == _MAY_NOT


def code_of(error: sa.exc.DBAPIError) -> int | None:
    """The server's number of an error."""
    return error.orig.args[0] if error.orig is not None and error.orig.args else None


def account_of(connection: Connection) -> str:
    """The account by which the server knows this connection's user, as a statement names it."""
    name, _, host = str(connection.exec_driver_sql("SELECT CURRENT_USER()").scalar()).rpartition("@")
    return f"'{name}'@'{host}'"


# --- the binlog -----------------------------------------------------------------------------------------------


def _binlog_findings(connection: Connection) -> list[Finding]:
    if may_read_binlog(connection):
        return []
    account = account_of(connection)
    what = f"{account} may not read the binlog"
    role = _role_that_may(connection)
    if role is not None:
        joined = "FOR" if is_mariadb(connection) else "TO"
        return [Finding(f"{what} without its role {role}", f"SET DEFAULT ROLE {role} {joined} {account}")]
    return [Finding(what, f"GRANT REPLICATION SLAVE ON *.* TO {account}")]


def may_read_binlog(connection: Connection) -> bool:
    """Whether the connection's user may read the binlog, by its own rights and its active roles.

    MySQL lets the same users see its replicas. MariaDB has no such statement, but lists all grants that hold now, also
    those of active roles and of PUBLIC. Only a grant on *.* counts.
    """
    if is_mariadb(connection):
        grants = (_GRANT_ON_ALL.match(str(row[0])) for row in connection.exec_driver_sql("SHOW GRANTS"))
        return any(grant and not _READS_BINLOG.isdisjoint(grant[1].upper().split(", ")) for grant in grants)
    for statement in ("SHOW REPLICAS", "SHOW SLAVE HOSTS"):  # the second before MySQL 8.0.22
        try:
            connection.exec_driver_sql(statement).all()
            return True
        except sa.exc.DBAPIError as error:
            if code_of(error) == _MAY_NOT:
                return False
            if code_of(error) != _NO_SUCH_STATEMENT:
                raise
    return False


def _role_that_may(connection: Connection) -> str | None:
    """An inactive role of the user with which it could read the binlog."""
    rows = connection.exec_driver_sql("SELECT role_name FROM information_schema.applicable_roles").all()
    with connection.engine.connect() as session:
        try:
            for role in sorted({str(row[0]) for row in rows}):
                quoted = f"`{role}`"
                try:
                    session.exec_driver_sql(f"SET ROLE {quoted}")
                except sa.exc.DBAPIError as error:
                    if error.connection_invalidated:
                        raise
                    continue  # a role of a role, which cannot be chosen by itself
                if may_read_binlog(session):
                    return quoted
        finally:
            session.invalidate()  # the pool's next user must not get the role
    return None


# --- tables ---------------------------------------------------------------------------------------------------


def _needed(within: str) -> Iterator[tuple[str, str, str]]:
    """Each right to a table: its name, the table, and a statement that needs it and changes nothing. `within`: what
    stands before a table's name."""
    for outbox in OUTBOXES:
        name, table = outbox.table.name, within + outbox.table.name
        yield "SELECT", name, f"SELECT 1 FROM {table} LIMIT 0"
        yield "UPDATE", name, f"EXPLAIN UPDATE {table} SET relayed = relayed WHERE 1 = 0"
    name, table = notify_refused.name, within + notify_refused.name
    yield "SELECT", name, f"SELECT 1 FROM {table} LIMIT 0"
    yield "INSERT", name, f"EXPLAIN INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0"
    yield "UPDATE", name, f"EXPLAIN UPDATE {table} SET state = state WHERE 1 = 0"
    yield "DELETE", name, f"EXPLAIN DELETE FROM {table} WHERE 1 = 0"
    name, table = server_member.name, within + server_member.name
    yield "SELECT", name, f"SELECT 1 FROM {table} LIMIT 0"
    yield "INSERT", name, f"EXPLAIN INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0"
    yield "UPDATE", name, f"EXPLAIN UPDATE {table} SET name = name WHERE 1 = 0"


_LEADS_TO = {
    notify_refused.name: "a message that no queue takes would hold the bridge up",
    server_member.name: "no row is purged, since the bridge cannot note how far it has read",
}
_OF_AN_OUTBOX = "a message that no queue takes would hold the bridge up, and --backfill cannot read the table"


def _table_findings(connection: Connection, schema: str = "") -> list[Finding]:
    """Findings about tables of a schema that are there, and that the user may not use as a bridge does.

    A user without any right to a table does not see it, as if it were not there.
    """
    missing: dict[str, list[str]] = {}
    within = connection.dialect.identifier_preparer.quote_identifier(schema) + "." if schema else ""
    for right, table, statement in _needed(within):
        try:
            connection.exec_driver_sql(statement).all()
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated:
                raise  # SQLAlchemy refuses the next statement with an error that no caller expects
            if code_of(error) in _TABLE_DENIED and has_table(connection, table, schema):
                missing.setdefault(table, []).append(right)
    if not missing:
        return []
    account = account_of(connection)
    return [
        Finding(
            f"{account} lacks {', '.join(rights)} on {within}{table}: {_LEADS_TO.get(table, _OF_AN_OUTBOX)}",
            f"GRANT {', '.join(rights)} ON {within}{table} TO {account}",
            stops=False,
        )
        for table, rights in missing.items()
    ]
