"""The atomic question whether a transaction committed in this database; if it did not, asking prevents its commit.

In a new READ COMMITTED transaction on the primary (REPEATABLE READ where the binlog has statements), a tombstone with
the transaction's id is inserted; a conflict is ignored. Then the row is read. All statements name one schema, whose
source id is compared in the same transaction. A running transaction holds the row's lock, so that the question waits
for it, or gives up after a lock timeout without an answer. The answer comes from the SELECT, never from the row count.
https://www.postgresql.org/docs/15/sql-insert.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.check.listener import CheckUnavailable
from notify.protocol import ids
from notify.runtime.databases import (
    ALL_ROWS,
    LEFT_BEHIND,
    allow_writes,
    commits_by_itself,
    drop_if_gone,
    is_denied,
    is_doubled,
    is_level_refused,
    reason_of,
)
from notify.runtime.schemas import named_by, qualified, text_of

T = TypeVar("T")
LOCK_TIMEOUT_MS = 300
"""How long a question waits for a running transaction; on MariaDB and MySQL it is rounded up to a second."""

_TOMBSTONE = (
    "INSERT INTO {half}"
    " (transaction_id, message_no, producer_group, mode, state, shards, topic, relayed, created_at)"
    " VALUES (:id, 0, :producer_group, 'half', 'ROLLED_BACK', '', '', 1, {now}) {ignore}"
)
_LOCAL_ROW = "SELECT state, shards, relayed FROM {half} WHERE transaction_id = :id AND message_no = 0"
_SOURCE = f"SELECT id, purged_before FROM {{source}} LIMIT {ALL_ROWS}"

_ON_CONFLICT = "ON CONFLICT DO NOTHING"
_ON_MYSQL = {"now": "UTC_TIMESTAMP(6)", "ignore": ""}
"""ON DUPLICATE KEY UPDATE would need the right to UPDATE, which a user who only writes messages may lack, and drivers
of asyncio warn of what INSERT IGNORE ignores. So the error is caught, after which the transaction continues."""
_TOMBSTONES = {
    "postgresql": {"now": "clock_timestamp() AT TIME ZONE 'utc'", "ignore": _ON_CONFLICT},
    "mysql": _ON_MYSQL,
    "mariadb": _ON_MYSQL,
    "sqlite": {"now": "strftime('%Y-%m-%d %H\\:%M\\:%f', 'now')", "ignore": _ON_CONFLICT},
}


@dataclass(slots=True, frozen=True)
class LocalRow:
    """A row of the local table: its state, the shards that have the transaction's halves, and whether it is left behind
    (notify/client/tables/left_rows.py): then a producer, which keeps the order, commits a half that was stored late."""

    state: str
    shards: tuple[str, ...]
    is_left_behind: bool = False

    @staticmethod
    def of(state: object, shards: object, relayed: object) -> LocalRow:
        """The row of these columns."""
        names = tuple(shard for shard in text_of(shards).split(",") if shard)
        return LocalRow(text_of(state), names, relayed == LEFT_BEHIND)

    def commits(self, shard: str) -> bool:
        """Whether the half of a shard is committed. Raises CheckUnavailable while the row is left behind, unless
        another shard is known to have the half."""
        if self.state != "COMMITTED":
            return False
        if self.is_left_behind and (not self.shards or shard in self.shards):
            raise CheckUnavailable("its row waits for a producer of the group, which sends rows in their order")
        return shard in self.shards


class MayNotAsk(CheckUnavailable):
    """This user may not write the row that a question inserts, and so none of its transactions has a row there."""


def _sql(connection: Connection, statement: str, schema: str | None, **parts: str) -> sa.TextClause:
    named = named_by(connection, schema)
    names = {
        "half": qualified(connection, "half_message", named),
        "source": qualified(connection, "notify_source", named),
    }
    return sa.text(statement.format(**names, **parts))


def read_source(connection: Connection, schema: str | None = None) -> tuple[str, int]:
    """The source id of a schema, and the time in milliseconds before which its rows were purged by force.

    `schema`: None: where the connection finds the table. Raises CheckUnavailable if notify_source is empty or has
    several rows, SQLAlchemy's error if the table is missing.
    """
    rows = connection.execute(_sql(connection, _SOURCE, schema)).all()
    if not rows:
        raise CheckUnavailable("the table notify_source is empty: run create_tables on this database")
    if len(rows) > 1:
        raise CheckUnavailable(several_sources(sorted(text_of(row[0]) for row in rows)))
    return text_of(rows[0][0]), int(rows[0][1])


def several_sources(ids: Sequence[str]) -> str:
    """The sentence about a schema with these source ids, with its remedy."""
    return (
        f"the table notify_source has {len(ids)} rows ({', '.join(ids[:3])}), as after a dump was restored into it, "
        "and a schema is one source: delete all rows but the one whose id its transactions have had so far"
    )


def ask(
    connection: Connection,
    transaction_id: str,
    producer_group: str,
    schema: str | None = None,
    source: str | None = None,
) -> LocalRow:
    """Ask in a new transaction; the connection must not have an open one.

    `schema`: None: where the connection finds the table; `source`: the source id that the schema must have. Raises
    CheckUnavailable on a lock timeout or another error of the database; MayNotAsk if this user lacks a right. Raises
    CheckUnavailable also if the schema has another source id, or if there is no committed row and rows of that time
    were purged by force: then the outcome is unknown, and no tombstone remains.
    """
    name = connection.dialect.name
    if name not in _TOMBSTONES:
        raise CheckUnavailable(f"checks do not support {name}: write a CheckMessageListener")
    tombstone = _sql(connection, _TOMBSTONE, schema, **_TOMBSTONES[name])
    parameters = {"id": transaction_id, "producer_group": producer_group}

    def asked() -> LocalRow:
        try:
            with short_lock_waits(connection):
                connection.execute(tombstone, parameters)
        except sa.exc.DBAPIError as error:
            if _TOMBSTONES[name]["ignore"] or not is_doubled(error.orig):
                raise
        return _read(connection, transaction_id, schema, source)

    try:
        # REPEATABLE READ is as good here: the first read, which makes the snapshot, comes after the insert.
        return in_own_transaction(connection, asked)
    except sa.exc.SQLAlchemyError as error:
        if isinstance(error, sa.exc.DBAPIError) and is_denied(error.orig):
            raise MayNotAsk(f"this user may not ask in {schema or 'the database'}: {error.orig}") from error
        raise CheckUnavailable(f"the database did not answer: {reason_of(error)}") from error


def in_own_transaction(connection: Connection, function: Callable[..., T], *arguments: Any) -> T:
    """Call `function(*arguments)` in a transaction at READ COMMITTED, and return its result; at REPEATABLE READ, from
    the beginning, where MySQL or MariaDB takes no writes at the other level.

    At REPEATABLE READ a statement would lock every row that it looks at, and the gaps between them: it would wait for
    what others have not committed, and they for it.
    """
    try:
        with _own_transaction(connection, "READ COMMITTED"):
            return function(*arguments)
    except sa.exc.DBAPIError as error:
        if not is_level_refused(error.orig):
            raise
    with _own_transaction(connection, "REPEATABLE READ"):
        return function(*arguments)


@contextmanager
def _own_transaction(connection: Connection, level: str) -> Iterator[None]:
    """A transaction at an isolation level that can write, also on a connection that commits each statement by itself.

    The level is set for this transaction only. The session is the service's, and SQLAlchemy's own way to set a level
    would leave the session with the database's default, and without the driver's autocommit.
    """
    is_postgresql, commits = connection.dialect.name == "postgresql", commits_by_itself(connection)
    is_mysql = connection.dialect.name in ("mysql", "mariadb")
    end = _AND_NO_MORE if is_mysql else ""
    with connection.begin():
        try:
            if connection.dialect.name == "sqlite":
                if not _in_transaction(connection):
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
            elif is_postgresql:
                if commits:
                    connection.exec_driver_sql("BEGIN")
                # Nothing is set where nothing changes: a listener of the service may have run a query already.
                if connection.exec_driver_sql("SHOW transaction_isolation").scalar() != level.lower():
                    connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
                if connection.exec_driver_sql("SHOW transaction_read_only").scalar() != "off":
                    allow_writes(connection)
            else:
                connection.exec_driver_sql(f"ROLLBACK{_AND_NO_MORE}")
                connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
                connection.exec_driver_sql("START TRANSACTION READ WRITE")
            yield
        except BaseException as error:
            drop_if_gone(connection, getattr(error, "orig", None))
            if (commits or is_mysql) and not connection.invalidated:
                connection.exec_driver_sql(f"ROLLBACK{end}")
            raise
        if commits or is_mysql:
            connection.exec_driver_sql(f"COMMIT{end}")


_AND_NO_MORE = " AND NO CHAIN NO RELEASE"
"""Ends a transaction of MySQL or MariaDB whatever its completion_type, which may begin the next one at once, at the
same isolation level."""


@contextmanager
def short_lock_waits(connection: Connection, milliseconds: int = LOCK_TIMEOUT_MS) -> Iterator[None]:
    """Bound the waits of a transaction for locks of rows and tables. On SQLite the driver's timeout bounds them."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{milliseconds}ms'")
    if connection.dialect.name not in ("mysql", "mariadb"):
        yield
        return
    # Neither server can set these for a transaction. MariaDB can for a statement (SET STATEMENT), MySQL cannot: its
    # hint SET_VAR does not take them.
    row = connection.exec_driver_sql("SELECT @@SESSION.innodb_lock_wait_timeout, @@SESSION.lock_wait_timeout").one()
    seconds = math.ceil(milliseconds / 1000)
    try:
        connection.exec_driver_sql(_LOCK_WAITS.format(seconds, seconds))
        yield
    finally:
        if not connection.invalidated:
            try:
                connection.exec_driver_sql(_LOCK_WAITS.format(*row))
            except BaseException:
                connection.invalidate()  # the service must not get it with these bounds
                raise


_LOCK_WAITS = "SET SESSION innodb_lock_wait_timeout = {}, lock_wait_timeout = {}"


def _read(connection: Connection, transaction_id: str, schema: str | None, source: str | None) -> LocalRow:
    """Read the row after the insert.

    The source is read last. A purge that deleted the row during this transaction has set `purged_before` by then. In
    this case the transaction is rolled back, so that no tombstone replaces the row.
    """
    row = connection.execute(_sql(connection, _LOCAL_ROW, schema), {"id": transaction_id}).one_or_none()
    if row is None:
        raise CheckUnavailable("the row is missing after its insert")
    local_row = LocalRow.of(*row)
    its_source, purged_before = read_source(connection, schema)
    if source is not None and its_source != source:
        raise CheckUnavailable(f"the schema {schema!r} now has source id {its_source}, and had {source} a moment ago")
    if local_row.state != "COMMITTED" and ids.milliseconds(ids.from_text(transaction_id)) <= purged_before:
        raise CheckUnavailable("rows of that time were purged by force: an operator has to decide")
    return local_row


@contextmanager
def short_waits(connection: Connection) -> Iterator[None]:
    """On SQLite, bound the wait for its database lock. Enter this before a transaction begins."""
    if connection.dialect.name != "sqlite":
        yield
        return
    previous = _busy_timeout(connection, None)
    _busy_timeout(connection, LOCK_TIMEOUT_MS)
    try:
        yield
    finally:
        _busy_timeout(connection, previous)


def _busy_timeout(connection: Connection, milliseconds: int | None) -> int:
    """Read or set the timeout on the driver's connection; SQLAlchemy's would begin a transaction."""
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
