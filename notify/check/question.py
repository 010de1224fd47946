"""The atomic question: did this transaction commit here? If not, asking makes sure that it never will.

In a new READ COMMITTED transaction on the primary a tombstone with the transaction's id is inserted, a conflict is
ignored, and then the row is read. A running transaction holds the row's lock, so the question waits for it, or gives up
after a lock timeout without an answer. The answer comes from the SELECT, never from the row count.
https://www.postgresql.org/docs/15/sql-insert.html, https://mariadb.com/kb/en/set-statement/
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify import ids
from notify.check.listener import CheckUnavailable
from notify.databases import at_level

LOCK_TIMEOUT_MS = 300
"""How long a question waits for a running transaction; MariaDB and MySQL round up to a second."""

_TOMBSTONE = (
    "INSERT INTO half_message"
    " (transaction_id, message_no, producer_group, mode, state, shards, topic, relayed, created_at)"
    " VALUES (:id, 0, :producer_group, 'half', 'ROLLED_BACK', '', '', 1, {now}) {ignore}"
)
_STANDS = sa.text("SELECT state, shards FROM half_message WHERE transaction_id = :id AND message_no = 0")
_SOURCE = sa.text("SELECT id, purged_before FROM notify_source")
_PURGED = sa.text("SELECT purged_before FROM notify_source")

_POSTGRESQL = sa.text(_TOMBSTONE.format(now="clock_timestamp() AT TIME ZONE 'utc'", ignore="ON CONFLICT DO NOTHING"))
_MYSQL = sa.text(_TOMBSTONE.format(now="UTC_TIMESTAMP(6)", ignore="ON DUPLICATE KEY UPDATE state=state"))
_SQLITE = sa.text(_TOMBSTONE.format(now="strftime('%Y-%m-%d %H:%M:%f', 'now')", ignore="ON CONFLICT DO NOTHING"))


@dataclass(slots=True, frozen=True)
class Stands:
    """A row of the local table: its state, and the shards that have the transaction's halves."""

    state: str
    shards: tuple[str, ...]


def read_source(connection: Connection) -> tuple[str, int]:
    """The database's source id, and the time in milliseconds before which its rows were purged by force.

    Raises CheckUnavailable if notify_source is empty, SQLAlchemy's error if the table is missing.
    """
    row = connection.execute(_SOURCE).one_or_none()
    if row is None:
        raise CheckUnavailable("the table notify_source is empty: run create_tables on this database")
    return str(row[0]), int(row[1])


def ask(connection: Connection, transaction_id: str, producer_group: str) -> Stands:
    """Ask in a transaction of its own; the connection must have none open.

    Raises CheckUnavailable on a lock timeout or another error of the database, and if there is no committed row and
    rows of that time were purged by force: then the outcome is unknown, and no tombstone remains.
    """
    dialect = connection.dialect
    parameters = {"id": transaction_id, "producer_group": producer_group}
    try:
        if dialect.name == "postgresql":
            connection = at_level(connection, "READ COMMITTED")
            with connection.begin():
                connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms'"))
                connection.execute(_POSTGRESQL, parameters)
                stands = _read(connection, parameters)
        elif dialect.name in ("mysql", "mariadb"):
            connection = at_level(connection, "READ COMMITTED")
            with connection.begin():
                seconds = math.ceil(LOCK_TIMEOUT_MS / 1000)
                if getattr(dialect, "is_mariadb", False):
                    timeout = f"SET STATEMENT innodb_lock_wait_timeout={seconds} FOR "
                    connection.execute(sa.text(timeout + _MYSQL.text), parameters)
                else:
                    connection.execute(sa.text(f"SET SESSION innodb_lock_wait_timeout = {seconds}"))
                    connection.execute(_MYSQL, parameters)
                stands = _read(connection, parameters)
        elif dialect.name == "sqlite":
            stands = _ask_sqlite(connection, parameters)
        else:
            raise CheckUnavailable(f"checks do not support {dialect.name}: write a CheckMessageListener")
    except sa.exc.SQLAlchemyError as error:
        raise CheckUnavailable(f"the database did not answer: {type(error).__name__}") from error
    return stands


def _read(connection: Connection, parameters: dict[str, str]) -> Stands:
    """The row after the insert.

    The purge's mark is read last. A purge that deleted the row during this transaction has set the mark by then, and
    this transaction is rolled back, so that it leaves no tombstone in place of the row.
    """
    row = connection.execute(_STANDS, parameters).one_or_none()
    if row is None:
        raise CheckUnavailable("the row is missing after its insert")
    stands = Stands(str(row[0]), tuple(s for s in str(row[1]).split(",") if s))
    purged_before = int(connection.execute(_PURGED).scalar_one())
    if stands.state != "COMMITTED" and ids.milliseconds(ids.from_text(parameters["id"])) <= purged_before:
        raise CheckUnavailable("rows of that time were purged by force: an operator has to decide")
    return stands


def _ask_sqlite(connection: Connection, parameters: dict[str, str]) -> Stands:
    with connection.begin():
        if not _in_transaction(connection):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.execute(_SQLITE, parameters)
        return _read(connection, parameters)


@contextmanager
def short_waits(connection: Connection) -> Iterator[None]:
    """On SQLite, bound the wait for its one lock; enter this before a transaction begins."""
    if connection.dialect.name != "sqlite":
        yield
        return
    before = _busy_timeout(connection, None)
    _busy_timeout(connection, LOCK_TIMEOUT_MS)
    try:
        yield
    finally:
        _busy_timeout(connection, before)


def _busy_timeout(connection: Connection, milliseconds: int | None) -> int:
    """Read or set the timeout on the driver's connection, because SQLAlchemy would begin a transaction."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute("PRAGMA busy_timeout" + ("" if milliseconds is None else f" = {milliseconds}"))
        row = cursor.fetchone()
        return int(row[0]) if row is not None else 0
    finally:
        cursor.close()


def _in_transaction(connection: Connection) -> bool:
    raw = connection.connection.driver_connection
    return bool(getattr(raw, "in_transaction", False))
