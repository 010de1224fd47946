"""Committed transactions as they stand in a table: the service's outbox, or the server's own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection, Engine

from notify.client import table as local
from notify.databases import INSTANT, REFUSED, UNSENT
from notify.errors import InvalidRequest
from notify.storage.sql import tables as server
from notify.wire import BridgedTransaction, PackedMessage

ALL = sa.true()
_MESSAGE = ("topic", "body", "key", "tag", "headers", "delay", "deliver_at", "ttl")
_READ = ("transaction_id", "producer_group", *_MESSAGE)
"""The columns that a mover reads: a table may lack later ones."""


class Place(NamedTuple):
    """A transaction of an outbox, by which time it is the oldest (as its driver reads that), and its bodies' bytes."""

    id: str
    at: Any
    size: int


@dataclass(slots=True, frozen=True)
class Outbox:
    """A table, what in it waits to be sent, and by which time it is the oldest."""

    table: sa.Table
    waiting: Any
    at: Any

    def oldest(
        self, connection: Connection, limit: int, narrowed: Any = ALL, behind: Place | None = None
    ) -> list[Place]:
        """Waiting transactions, the oldest first; `narrowed` is a further condition, `behind` where the last ended."""
        t = self.table.c
        other = self.table.alias()
        size = sa.select(sa.func.sum(sa.func.length(other.c.body))).where(other.c.transaction_id == t.transaction_id)
        at, readable = _as_it_stands(connection, self.at)
        wanted = sa.select(t.transaction_id, readable, size.scalar_subquery()).where(
            self.waiting, t.message_no == 0, narrowed
        )
        if behind is not None:
            later = sa.and_(at == behind.at, t.transaction_id > behind.id)
            wanted = wanted.where(at >= behind.at, sa.or_(at > behind.at, later))
        rows = connection.execute(wanted.order_by(self.at, t.transaction_id).limit(limit))
        return [Place(str(name), at, int(size or 0)) for name, at, size in rows]

    def beside(self, topics: Sequence[str]) -> Any:
        """The condition on message 0 that a transaction has a message of another topic."""
        t = self.table.c
        other = self.table.alias()
        more = sa.exists().where(
            other.c.transaction_id == t.transaction_id, other.c.message_no > 0, other.c.topic.not_in(topics)
        )
        return sa.or_(t.topic.not_in(topics), more)

    def whose(self, connection: Connection, name: str) -> tuple[str, str, int]:
        """Producer group, topic of the first message and number of messages of a transaction."""
        t = self.table.c
        wanted = sa.select(t.producer_group, t.topic).where(t.transaction_id == name).order_by(t.message_no)
        rows = connection.execute(wanted).all()
        return str(rows[0][0]), str(rows[0][1]), len(rows)

    def read(self, connection: Connection, names: Sequence[str]) -> list[BridgedTransaction]:
        """These transactions, whole, in this order."""
        t = self.table
        rows = connection.execute(
            sa.select(*[t.c[name] for name in _READ])
            .where(_among(connection, t.c.transaction_id, names))
            .order_by(t.c.transaction_id, t.c.message_no)
        ).mappings()
        by_name: dict[str, BridgedTransaction] = {}
        for row in rows:
            name = str(row["transaction_id"])
            if name not in by_name:
                by_name[name] = BridgedTransaction(id=name, producer_group=row["producer_group"], messages=[])
            by_name[name].messages.append(message_of(row))
        return [by_name[name] for name in names if name in by_name]

    def mark(self, connection: Connection, names: Sequence[str], state: int) -> None:
        """Note what became of transactions. What a person has dropped meanwhile stays so."""
        if names:
            t = self.table
            chosen = sa.and_(_among(connection, t.c.transaction_id, names), t.c.relayed.in_((UNSENT, REFUSED)))
            connection.execute(t.update().where(chosen).values(relayed=state))


def _as_it_stands(connection: Connection, at: Any) -> tuple[Any, Any]:
    """A column of instants to compare with, and to read: one that Python's calendar does not know must not hold up all
    others. SQLite holds any text; PostgreSQL knows infinity, and years before the first."""
    if connection.dialect.name == "sqlite":
        text = sa.type_coerce(at, sa.String)
        return text, text
    if connection.dialect.name == "postgresql":
        first, last = (sa.literal(moment, INSTANT) for moment in (datetime.min, datetime.max))
        return at, sa.func.least(sa.func.greatest(at, first), last)
    return at, at


def _among(connection: Connection, column: sa.Column[Any], names: Sequence[str]) -> Any:
    """The condition that a column has one of these values: one parameter where an array can be one, which costs the
    client less than hundreds of them."""
    if connection.dialect.name == "postgresql":
        return column == sa.any_(sa.literal(list(names), postgresql.ARRAY(sa.Text)))
    return column.in_(names)


LOCAL = Outbox(
    local.half_message,
    local.is_waiting,
    local.half_message.c.created_at,
)
SERVER = Outbox(
    server.server_half_message,
    server.is_waiting,
    server.server_half_message.c.decided_at,
)
OUTBOXES = (LOCAL, SERVER)


def present(engine: Engine | Connection) -> list[Outbox]:
    """Those that a database has."""
    names = set(sa.inspect(engine).get_table_names())
    return [outbox for outbox in OUTBOXES if outbox.table.name in names]


def source_name(connection: Connection) -> str:
    """The id that the database was given, by which a queue knows it after a failover, too. Raises InvalidRequest."""
    tables = set(sa.inspect(connection).get_table_names())
    for column in (server.server_shard.c.source, local.notify_source.c.id):
        source = connection.execute(sa.select(column)).scalar() if column.table.name in tables else None
        if source:
            return str(source)
    raise InvalidRequest("the database has no source id: run create_tables or `notify storage upgrade`, or name it")


def message_of(row: Any) -> PackedMessage:
    """A row as a message. Raises ValueError or MsgspecError where it is none."""
    deliver_at = row["deliver_at"]
    if isinstance(deliver_at, str):  # MySQL's driver leaves a date as it stands if the calendar has none such
        raise ValueError(f"deliver_at is no time: {deliver_at!r}")
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
