"""A database's statements on the hot path, which store rows and outcomes: the protocol, and the shared code.

SQLAlchemy's compiler costs more per row than the database, so these few statements are written by hand.
docs/performance.md has the measured rates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from sqlalchemy.engine import Engine

from notify.errors import DiskFull, InvalidRequest, Unavailable
from notify.runtime.databases import is_full
from notify.storage.records import NewTransaction
from notify.storage.sql.rows import COLUMNS, FIXED, Row

TABLE = "server_half_message"
STATEMENT_BYTES = 2 << 20
"""The most bytes of bodies in one statement: MySQL and MariaDB get twice as many characters."""
STATEMENT_ROWS = 1000
IDS_A_STATEMENT = 200
NUL = "PostgreSQL holds no NUL character (U+0000): leave it out of key, source and instance"


class Duplicate(Exception):
    """A row already exists; roll the transaction back."""


class Again(Exception):
    """A deadlock, or a lock that was not granted in time: a repetition may succeed."""


class Gone(Exception):
    """The connection is lost. It is unknown whether a commit under way took effect."""


def is_a_values_fault(error: Exception) -> bool:
    """Whether an error is a DataError of the DB-API: the fault is in a value."""
    return isinstance(error, ValueError) or any(kind.__name__ == "DataError" for kind in type(error).__mro__)


def is_of_the_database(error: Exception) -> bool:
    """Whether an error comes from a driver: then its base class is the DB-API's Error."""
    return isinstance(error, OSError) or any(kind.__name__ == "Error" for kind in type(error).__mro__)


def given_up(shard: str, error: Exception) -> Unavailable:
    """The answer if a database does not do in time what it may do later."""
    if is_full(error):
        return DiskFull(f"shard {shard!r}: the database has no room ({error}); make room on its disk")
    return Unavailable(
        f"shard {shard!r}: the database does not answer ({error}); try again: it is not known whether this was stored"
    )


def invalid_value(error: Exception) -> InvalidRequest:
    """The answer to a value that the database cannot hold."""
    why = NUL if "0x00" in str(error) else f"the database cannot hold this: {str(error)[:300]}"
    return InvalidRequest(why, "invalid_value")


def has_nul(t: NewTransaction) -> bool:
    """Whether a text that the server does not check itself has a NUL character."""
    if "\0" in t.source or "\0" in t.instance:
        return True
    return True in ["\0" in (m.key or "") for m in t.messages]


class Dialect(Protocol):
    """The statements of one kind of database, on a connection of its driver."""

    holds_nul: bool
    """Whether its texts may have a NUL character."""

    def connect(self) -> Any: ...

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        """Raises Duplicate if one of the rows already exists."""
        ...

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        """Set the outcome of the undecided transactions among these; returns the number of rows."""
        ...

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        """(id, state, producer group, token) of the transactions that exist, locked until the end."""
        ...

    def commit(self, connection: Any) -> None: ...

    def rollback(self, connection: Any) -> None: ...

    def error(self, error: Exception) -> Exception:
        """The error to raise for a driver's error: Duplicate, Again, Gone, or the same."""
        ...


def chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows in parts for one statement each, bounded in number and in bytes."""
    first, size = 0, 0
    for i, row in enumerate(rows):
        size += len(row.body) + len(row.headers or "") + 256
        if i > first and (size > STATEMENT_BYTES or i - first >= STATEMENT_ROWS):
            yield rows[first:i]
            first, size = i, len(row.body) + 256
    yield rows[first:]


def by_ids(names: Sequence[str]) -> Iterator[str]:
    """Ids as the inside of IN (…), a few hundred at a time, sorted so that locks are taken in one order."""
    ordered = iter(sorted(names))
    while some := list(itertools.islice(ordered, IDS_A_STATEMENT)):
        yield "'" + "','".join(some) + "'"


LOCK = (
    "SELECT transaction_id, state, producer_group, token FROM " + TABLE + " WHERE transaction_id IN ({}) AND "
    "message_no = 0"
)
DECIDE = (
    "UPDATE " + TABLE + " SET state = '{state}', decided_at = '{at}', next_check_us = NULL "
    "WHERE transaction_id IN ({ids}) AND state IN ('PREPARED', 'PARKED')"
)


class Statements:
    """Base of the three dialects: statements as text through a cursor."""

    for_update = " FOR UPDATE"
    holds_nul = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        changed = 0
        with connection.cursor() as cursor:
            for inside in by_ids(names):
                cursor.execute(DECIDE.format(state=state, at=at, ids=inside))
                changed += cursor.rowcount
        return changed

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        found: list[tuple[str, str, str, int]] = []
        with connection.cursor() as cursor:
            for inside in by_ids(names):
                cursor.execute(LOCK.format(inside) + self.for_update)
                found += cursor.fetchall()
        return found

    def commit(self, connection: Any) -> None:
        connection.commit()

    def rollback(self, connection: Any) -> None:
        connection.rollback()


FIXED_COLUMNS = list(FIXED)
FIXED_VALUES = ",".join(str(v) if isinstance(v, int) else f"'{v}'" for v in FIXED.values())
QUOTED_COLUMNS = ",".join([f'"{c}"' for c in (*COLUMNS, *FIXED_COLUMNS)])
