"""Finds and deletes the rows of half_message that are old enough to be purged, and notes for half_message and
notify_inbox that old rows may be gone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.client.tables.definitions import PURGES, half_message, has_source_id, notify_source
from notify.protocol import ids
from notify.runtime.databases import DROPPED, RELAYED, UNSENT, database_now
from notify.runtime.guarantees import verify_once
from notify.runtime.schemas import by_key

DAY = 86_400.0
"""Seconds of a day."""
CLOCK_SKEW = timedelta(minutes=10)
"""How far a producer's clock may run ahead of its database's; beyond that, its rows are purged later."""


def instant_before(connection: Connection, seconds: float) -> datetime:
    """The instant `seconds` ago by the database's clock, in UTC without a time zone, like the columns."""
    now: Any = connection.execute(sa.select(database_now())).scalar_one()
    moment: datetime = datetime.fromisoformat(now[:26]) if isinstance(now, str) else now
    return moment - timedelta(seconds=seconds)


class OldTransaction(NamedTuple):
    """A transaction that a purge may delete, as its first row describes it.

    `shards`: the shards of its half, separated by commas. `is_waiting`: whether it is in the outbox, and no relay has
    marked it as sent (a bridge does not mark rows).
    """

    producer_group: str
    id: str
    shards: str
    is_waiting: bool


def oldest_transactions(
    connection: Connection, cutoff: datetime, limit: int, after: str = "", *, waiting: bool = False
) -> Sequence[OldTransaction]:
    """Transactions whose rows are older than an instant (`instant_before`), with ids above `after`.

    A caller that reads several pages takes the instant once, because rows become old as fast as they were written.
    `waiting`: include transactions that are in the outbox and not marked as sent.

    Ids rise with time, so the primary key finds the oldest rows. An index of times would cost every commit a write.
    """
    verify_once(connection, PURGES)
    last_ms = max(0, round((cutoff + CLOCK_SKEW).replace(tzinfo=UTC).timestamp() * 1000))
    columns = half_message.c
    states = (UNSENT, RELAYED, DROPPED) if waiting else (RELAYED, DROPPED)
    highest_id = ids.to_text(last_ms.to_bytes(6) + bytes(10))
    rows = connection.execute(
        sa.select(columns.producer_group, columns.transaction_id, columns.shards, columns.relayed)
        .where(columns.transaction_id > after, columns.transaction_id < highest_id)
        .where(columns.created_at < cutoff, columns.message_no == 0, columns.relayed.in_(states))
        .order_by(columns.transaction_id)
        .limit(limit)
    )
    return [OldTransaction(str(row[0]), str(row[1]), str(row[2]), row[3] == 0) for row in rows]


def note_purged(connection: Connection, column: sa.Column[Any], cutoff: datetime) -> None:
    """Note that rows older than an instant (`instant_before`) may be gone. Call it in the transaction that deletes
    them."""
    before_ms = math.ceil(cutoff.replace(tzinfo=UTC).timestamp() * 1000)
    connection.execute(notify_source.update().where(has_source_id, column < before_ms).values({column: before_ms}))


def delete_transactions(connection: Connection, transaction_ids: Sequence[str]) -> int:
    """Delete the rows of transactions; returns the number of rows."""
    if not transaction_ids:
        return 0
    statement = half_message.delete().where(half_message.c.transaction_id.in_(transaction_ids))
    return connection.execute(by_key(statement, half_message)).rowcount
