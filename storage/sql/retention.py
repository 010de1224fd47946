"""Deletes transactions that were decided long ago, a few hundred at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from notify.protocol import ids
from notify.storage.sql.database import Database
from notify.storage.sql.movers import Movers, is_not_listed, is_past, movers_of
from notify.storage.sql.rows import moment_of
from notify.storage.sql.tables import server_half_message

log = structlog.get_logger("notify.sql")

PURGE_TRANSACTIONS = 500
SAY_EVERY_SECONDS = 3600.0
PURGE_ROUNDS = 40
"""Rows are deleted a few hundred at a time, each time in a transaction of its own, for this many rounds a call."""
_t = server_half_message.c


class SqlRetention:
    """Keeps decided transactions for a time."""

    def __init__(self, database: Database, retention_us: int) -> None:
        """`retention_us` 0: no bound."""
        self._database = database
        self._retention_us = retention_us
        self._say_at = 0.0

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Change the retention; the size of a database is not bounded."""
        self._retention_us = retention_us

    async def retain(self, now_us: int) -> int:
        """Delete transactions that were decided before the retention and that no mover still has to read."""
        if not self._retention_us:
            return 0
        before_us = now_us - self._retention_us
        deleted = 0
        for _ in range(PURGE_ROUNDS):
            names = await self._database.run(lambda connection: self._old(connection, before_us))
            if names:
                deleted += await self._database.run(partial(_delete, names))
            if len(names) < PURGE_TRANSACTIONS:
                break
        return deleted

    def _old(self, connection: Connection, before_us: int) -> list[str]:
        """The primary key finds the oldest rows, because ids rise with time. Rows that a mover has not read stay."""
        movers = movers_of(connection)
        self._say_who_holds_up(movers, before_us)
        highest = ids.to_text(max(0, before_us // 1000).to_bytes(6) + bytes(10))
        rows = connection.scalars(
            sa.select(_t.transaction_id)
            .where(_t.transaction_id < highest, _t.decided_at < moment_of(before_us), is_past(connection, movers))
            .order_by(_t.transaction_id)
            .limit(PURGE_TRANSACTIONS)
        )
        return [str(name) for name in rows]

    def _say_who_holds_up(self, movers: Movers, before_us: int) -> None:
        """Log once an hour which bridge keeps decided transactions from being deleted."""
        behind_us = before_us - movers.read_through_us
        if not movers.slowest or behind_us <= 0 or time.monotonic() < self._say_at:
            return
        self._say_at = time.monotonic() + SAY_EVERY_SECONDS
        log.warning(
            "purge_waits_for_a_bridge",
            shard=self._database.shard,
            bridge=movers.slowest,
            seconds_behind=round(behind_us / 1e6),
            remedy="start it; if it was removed permanently: notify storage forget NAME --storage …",
        )


def _delete(names: Sequence[str], connection: Connection) -> int:
    """Delete those that may still be deleted: a person may have had one tried again meanwhile."""
    among = _t.transaction_id.in_(names)
    return int(connection.execute(server_half_message.delete().where(among, is_not_listed(connection))).rowcount)
