"""Outbox: reads and marks committed transactions that wait in a table, in pages, the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from notify.protocol.wire import BridgedTransaction, PackedMessage
from notify.runtime.databases import INSTANT, REFUSED, UNSENT, whole

ALL = sa.true()
_MESSAGE = ("topic", "body", "key", "tag", "headers", "delay", "deliver_at", "ttl")
_READ = ("transaction_id", "producer_group", *_MESSAGE)
"""The columns that a mover (relay or bridge) reads; a table may lack columns of newer versions."""


class Place(NamedTuple):
    """A transaction of an outbox: its id, the time that it is ordered by (as the driver reads it), and the bytes of its
    bodies."""

    id: str
    at: Any
    size: int


@dataclass(slots=True, frozen=True)
class Outbox:
    """A table, the condition for its waiting rows, and the column of times that orders them."""

    table: sa.Table
    waiting: Any
    at: Any
    from_states: tuple[int, ...] = (UNSENT, REFUSED)
    """The values of `relayed` that `mark` changes."""

    def oldest(
        self, connection: Connection, limit: int, narrowed: Any = ALL, behind: Place | None = None
    ) -> list[Place]:
        """Waiting transactions, the oldest first; `narrowed`: a further condition; `behind`: the last page's end."""
        columns = self.table.c
        other = self.table.alias()
        size = sa.select(sa.func.sum(sa.func.length(other.c.body))).where(
            other.c.transaction_id == columns.transaction_id
        )
        at, readable = _as_it_stands(connection, self.at)
        query = sa.select(columns.transaction_id, readable, size.scalar_subquery()).where(
            self.waiting, columns.message_no == 0, narrowed
        )
        if behind is not None:
            later = sa.and_(at == behind.at, columns.transaction_id > behind.id)
            query = query.where(at >= behind.at, sa.or_(at > behind.at, later))
        rows = connection.execute(query.order_by(self.at, columns.transaction_id).limit(limit))
        return [Place(str(transaction_id), at, int(size or 0)) for transaction_id, at, size in rows]

    def newest(self, connection: Connection) -> Any:
        """The time of the newest waiting row, as the driver reads it; None if no row waits."""
        _, readable = _as_it_stands(connection, self.at)
        return connection.scalar(sa.select(readable).where(self.waiting).order_by(self.at.desc()).limit(1))

    def until(self, connection: Connection, at: Any) -> Any:
        """The condition that a row is not newer than this time (`newest`); None: no row is."""
        if at is None:
            return sa.false()
        is_sqlite = connection.dialect.name == "sqlite"
        if isinstance(at, bytes) if is_sqlite else not isinstance(at, datetime) or at == datetime.max:
            return sa.true()  # no time that Python knows; in SQLite bytes are greater than any text
        return _as_it_stands(connection, self.at)[0] <= at

    def has_other_topic(self, topics: Sequence[str]) -> Any:
        """The condition on message 0 that its transaction has a message of a topic other than `topics`."""
        columns = self.table.c
        other = self.table.alias()
        more = sa.exists().where(
            other.c.transaction_id == columns.transaction_id, other.c.message_no > 0, other.c.topic.not_in(topics)
        )
        return sa.or_(columns.topic.not_in(topics), more)

    def whose(self, connection: Connection, transaction_id: str) -> tuple[str, str, int]:
        """The producer group, the topic of the first message, and the number of messages of a transaction."""
        columns = self.table.c
        query = (
            sa.select(columns.producer_group, columns.topic)
            .where(columns.transaction_id == transaction_id)
            .order_by(columns.message_no)
        )
        rows = connection.execute(whole(query)).all()
        return str(rows[0][0]), str(rows[0][1]), len(rows)

    def read(self, connection: Connection, transaction_ids: Sequence[str]) -> list[BridgedTransaction]:
        """These transactions with all their messages, in this order."""
        columns = self.table.c
        query = (
            sa.select(*[columns[name] for name in _READ])
            .where(among(connection, columns.transaction_id, transaction_ids))
            .order_by(columns.transaction_id, columns.message_no)
        )
        rows = connection.execute(whole(query)).mappings()
        by_id: dict[str, BridgedTransaction] = {}
        for row in rows:
            row_id = str(row["transaction_id"])
            if row_id not in by_id:
                by_id[row_id] = BridgedTransaction(id=row_id, producer_group=row["producer_group"], messages=[])
            by_id[row_id].messages.append(message_of(row))
        return [by_id[row_id] for row_id in transaction_ids if row_id in by_id]

    def mark(self, connection: Connection, transaction_ids: Sequence[str], state: int) -> int:
        """Set `relayed` of transactions, except of those that an operator has dropped meanwhile; returns the number of
        their rows."""
        if not transaction_ids:
            return 0
        columns = self.table.c
        condition = sa.and_(
            among(connection, columns.transaction_id, transaction_ids), (columns.relayed + 0).in_(self.from_states)
        )
        rows = connection.execute(self.table.update().where(condition).values(relayed=state)).rowcount
        return rows if rows >= 0 else len(transaction_ids)  # some drivers do not count


def _as_it_stands(connection: Connection, at: Any) -> tuple[Any, Any]:
    """A column of times as two expressions, to compare with and to read. A time that Python's datetime does not know
    must not block all others: SQLite stores any text, PostgreSQL has infinity and years before 1."""
    if connection.dialect.name == "sqlite":
        text = sa.type_coerce(at, sa.String)
        return text, text
    if connection.dialect.name == "postgresql":
        first, last = (sa.literal(moment, INSTANT) for moment in (datetime.min, datetime.max))
        return at, sa.func.least(sa.func.greatest(at, first), last)
    return at, at


def among(connection: Connection, column: sa.Column[Any], values: Sequence[str]) -> Any:
    """The condition that a column has one of these values; on PostgreSQL with an array as the only parameter, which
    costs the client less than hundreds of parameters."""
    if connection.dialect.name == "postgresql":
        return column == sa.any_(sa.literal(list(values), postgresql.ARRAY(sa.Text)))
    return column.in_(values)


def message_of(row: Any) -> PackedMessage:
    """A row as a message. Raises ValueError or MsgspecError if the row is not a message."""
    deliver_at = row["deliver_at"]
    if isinstance(deliver_at, str):  # MySQL's driver returns a date as text if the calendar does not have it
        raise ValueError(f"deliver_at is not a time: {deliver_at!r}")
    return PackedMessage(
        topic=row["topic"],
        body=bytes(row["body"] or b""),
        key=row["key"],
        tag=row["tag"],
        headers=msgspec.json.decode(row["headers"]) if row["headers"] else None,
        delay=row["delay"],
        deliver_at=deliver_at.replace(tzinfo=UTC) if deliver_at is not None else None,
        ttl=row["ttl"],
    )
