"""Outboxes: the tables from which relays and bridges move transactions, a service's half_message and a server's."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.client.tables import definitions as local
from notify.client.tables.outbox import Outbox
from notify.errors import InvalidRequest
from notify.runtime.databases import has_table
from notify.runtime.guarantees import SELECT, UPDATE, Need
from notify.storage.sql import administration
from notify.storage.sql import tables as server

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
MOVES = (
    *(Need(outbox.table, sees=(SELECT, UPDATE), times=True) for outbox in OUTBOXES),
    Need(local.notify_source, sees=(SELECT,)),
    local.LISTS_REFUSED,
)
"""A mover's needs of a database's tables. A key that excludes a second row is not among it, since nobody checks the
rows of an outbox: its table may be partitioned by time."""
READS = tuple(
    Need(table, sees=(SELECT,), keeps=False, ranges=True)
    for table in (
        local.half_message, local.notify_inbox, local.notify_source, server.server_half_message, server.server_shard,
        server.server_key_map, server.server_member, administration.server_action,
    )
)  # fmt: skip
"""An audit's needs of all that it reads."""


def present(engine: Engine | Connection) -> list[Outbox]:
    """The outboxes whose tables the database has, in the schema of `notify.runtime.databases.schema_of`."""
    return [outbox for outbox in OUTBOXES if has_table(engine, outbox.table.name)]


def source_name(connection: Connection) -> str:
    """The source id stored in the schema, by which a queue recognizes it after a failover. Raises InvalidRequest."""
    for column in (server.server_shard.c.source, local.notify_source.c.id):
        source = connection.execute(sa.select(column)).scalar() if has_table(connection, column.table.name) else None
        if source:
            return str(source)
    raise InvalidRequest("the database has no source id: run create_tables or `notify storage upgrade`, or name it")
