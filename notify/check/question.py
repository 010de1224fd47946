"""The atomic question: did this transaction commit here? Asking settles it: from then on it cannot commit.

In a fresh READ COMMITTED transaction on the primary a tombstone with the transaction's id is inserted, ignoring a
conflict, and then what stands there is read. A transaction in flight holds the row's lock, so the question waits
for it, or gives up after a lock timeout and knows nothing. The answer is always taken from the SELECT, never from
the row count. https://www.postgresql.org/docs/15/sql-insert.html, https://mariadb.com/kb/en/set-statement/
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

LOCK_TIMEOUT_MS = 300
"""How long a question waits for a transaction in flight; on MariaDB and MySQL a whole second."""

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
    """The local table's answer: the row's state, and the shards whose half belongs to it."""

    state: str
    shards: tuple[str, ...]


def read_source(connection: Connection) -> tuple[str, int]:
    """The database's source id and up to which time (milliseconds) its rows were purged by force.

    Raises CheckUnavailable if the tables are not there.
    """
    row = connection.execute(_SOURCE).one_or_none()
    if row is None:
        raise CheckUnavailable("the table notify_source is empty: run create_tables on this database")
    return str(row[0]), int(row[1])


def ask(connection: Connection, transaction_id: str, producer_group: str) -> Stands:
    """Ask in a transaction of its own on a connection that has none open.

    Raises CheckUnavailable on a lock timeout or any error of the database, and where no commit stands and the rows of
    that time were purged by force: then nothing is known, and no tombstone is left.
    """
    dialect = connection.dialect
    parameters = {"id": transaction_id, "producer_group": producer_group}
    try:
        if dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="READ COMMITTED")
            with connection.begin():
                connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms'"))
                connection.execute(_POSTGRESQL, parameters)
                stands = _read(connection, parameters)
        elif dialect.name in ("mysql", "mariadb"):
            connection = connection.execution_options(isolation_level="READ COMMITTED")
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
            raise CheckUnavailable(f"there is no check for {dialect.name}; write a CheckMessageListener")
    except sa.exc.SQLAlchemyError as error:
        raise CheckUnavailable(f"the database did not answer: {type(error).__name__}") from error
    return stands


def _read(connection: Connection, parameters: dict[str, str]) -> Stands:
    """The row that stands after the insert.

    The purge's mark is read last, and not before the insert: a purge that deletes the row meanwhile has set it then,
    and this transaction, which would leave a tombstone in the row's place, is rolled back.
    """
    row = connection.execute(_STANDS, parameters).one_or_none()
    if row is None:
        raise CheckUnavailable("no row stands after the insert")
    stands = Stands(str(row[0]), tuple(s for s in str(row[1]).split(",") if s))
    purged_before = int(connection.execute(_PURGED).scalar_one())
    if stands.state != "COMMITTED" and ids.milliseconds(ids.from_text(parameters["id"])) <= purged_before:
        raise CheckUnavailable("rows of that time were purged by force; an operator has to decide")
    return stands


def _ask_sqlite(connection: Connection, parameters: dict[str, str]) -> Stands:
    with connection.begin():
        if not _in_transaction(connection):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.execute(_SQLITE, parameters)
        return _read(connection, parameters)


@contextmanager
def short_waits(connection: Connection) -> Iterator[None]:
    """On SQLite, have statements wait for its one lock no longer than a check may; before a transaction begins."""
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
    """Read or set it on the driver's connection, past SQLAlchemy, which would begin a transaction."""
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
