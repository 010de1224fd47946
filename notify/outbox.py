"""Committed transactions as they stand in a table: the service's outbox, or the server's own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.client import table as local
from notify.errors import InvalidRequest
from notify.storage.sql import tables as server
from notify.wire import BridgedTransaction, PackedMessage

RELAYED, REFUSED, DROPPED = 1, 2, 3
"""Values of `relayed` in a row that does not wait: the target has it, refuses it for good, or a person dropped it."""
ALL = sa.true()


@dataclass(slots=True, frozen=True)
class Outbox:
    """A table, what in it waits to be sent, and by which time it is the oldest."""

    table: sa.Table
    waiting: Any
    committed: Any
    """The rows that were ever to be sent, relayed or not."""
    at: Any

    def oldest(self, connection: Connection, limit: int, mine: Any = ALL) -> list[str]:
        """Ids of waiting transactions, the oldest first; `mine` narrows them down."""
        t = self.table.c
        wanted = sa.select(t.transaction_id).where(self.waiting, t.message_no == 0, mine)
        return [str(i) for i in connection.scalars(wanted.order_by(self.at, t.transaction_id).limit(limit))]

    def read(self, connection: Connection, names: Sequence[str]) -> list[BridgedTransaction]:
        """These transactions, whole, in this order."""
        t = self.table
        rows = connection.execute(
            sa.select(t).where(t.c.transaction_id.in_(names)).order_by(t.c.transaction_id, t.c.message_no)
        ).mappings()
        found: dict[str, BridgedTransaction] = {}
        for row in rows:
            name = str(row["transaction_id"])
            if name not in found:
                found[name] = BridgedTransaction(id=name, producer_group=row["producer_group"], messages=[])
            found[name].messages.append(message_of(row))
        return [found[name] for name in names if name in found]

    def mark(self, connection: Connection, names: Sequence[str], state: int) -> None:
        """Note what became of transactions."""
        if names:
            t = self.table
            connection.execute(t.update().where(t.c.transaction_id.in_(names)).values(relayed=state))

    def after(self, engine: Engine, name: str, limit: int) -> list[BridgedTransaction]:
        """Transactions that are committed, by rising id, from behind one."""
        t = self.table.c
        with engine.connect() as connection:
            wanted = sa.select(t.transaction_id).where(self.committed, t.message_no == 0, t.transaction_id > name)
            names = [str(i) for i in connection.scalars(wanted.order_by(t.transaction_id).limit(limit))]
            return self.read(connection, names) if names else []


LOCAL = Outbox(
    local.half_message,
    local.is_waiting,
    sa.and_(local.half_message.c.mode == "outbox", local.half_message.c.state != "ROLLED_BACK"),
    local.half_message.c.created_at,
)
SERVER = Outbox(
    server.server_half_message,
    server.is_waiting,
    server.server_half_message.c.state == "COMMITTED",
    server.server_half_message.c.decided_at,
)


def present(engine: Engine | Connection) -> list[Outbox]:
    """Those that a database has."""
    names = set(sa.inspect(engine).get_table_names())
    return [outbox for outbox in (LOCAL, SERVER) if outbox.table.name in names]


def source_name(connection: Connection) -> str:
    """The id that the database was given, by which a queue knows it after a failover, too. Raises InvalidRequest."""
    for statement in ("SELECT source FROM server_shard", "SELECT id FROM notify_source"):
        try:
            found = connection.exec_driver_sql(statement).scalar()
        except sa.exc.ProgrammingError:
            connection.rollback()
            continue
        if found:
            return str(found)
    raise InvalidRequest("the database has no source id: run create_tables or `notify storage upgrade`, or name it")


def message_of(row: Any) -> PackedMessage:
    """A row as a message."""
    deliver_at = row["deliver_at"]
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
