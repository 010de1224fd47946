"""The registry's data on the bridges and relays of one database: which committed rows have left it.

A bridge reports up to when it has read the log, and marks no rows; a relay marks each row that it has sent. A bridge's
entry stays until a person removes it (`notify storage forget`), because a stopped bridge must still find its rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.runtime.databases import REFUSED, has_table
from notify.storage.sql import registry
from notify.storage.sql.rows import moment_of
from notify.storage.sql.tables import is_settled, is_waiting, server_half_message, server_member

RELAY_GONE_SECONDS = 300
"""A relay without a heartbeat for this long does not run: if there is a bridge too, its marks are not waited for."""
_m, _t = server_member.c, server_half_message.c
_refused = sa.table("notify_refused", sa.column("transaction_id"), sa.column("state"))
"""The list of refused messages that movers and people edit: see notify/movers/refused.py."""


@dataclass(frozen=True, slots=True)
class Movers:
    """The movers of a database. `slowest`: the name of the bridge that is furthest behind; "" without bridges."""

    slowest: str = ""
    read_through_us: int = 0
    """Up to when the slowest bridge has read the log."""
    marks: bool = True
    """Whether relays mark the rows that leave, or there is no mover yet."""

    @property
    def have_left(self) -> Any:
        """The condition for rows of committed transactions that every mover has moved, without refused ones."""
        read = sa.and_(_t.decided_at < moment_of(max(0, self.read_through_us)), _t.relayed != REFUSED)
        if not self.slowest:
            return is_settled
        return sa.and_(is_settled, read) if self.marks else read


def is_not_listed(connection: Connection) -> Any:
    """The condition for transactions that no person has to decide and no mover has to try again.

    A refused transaction that will be tried again is marked as if it had never been read, while the bridge's binlog
    is past it: only the list says that its rows are needed.
    """
    if not has_table(connection, _refused.name):
        return sa.true()
    listed = sa.select(_refused.c.transaction_id).where(_refused.c.state != "DROPPED")
    return _t.transaction_id.not_in(listed)


def is_past(connection: Connection, movers: Movers | None = None) -> Any:
    """The condition for decided transactions that no mover still has to read: retention deletes them by age.

    `movers`: the movers of the database, if known.
    """
    movers = movers or movers_of(connection)
    return sa.and_(
        _t.message_no == 0,
        _t.next_check_us.is_(None),
        sa.or_(_t.state == "ROLLED_BACK", sa.and_(_t.state == "COMMITTED", movers.have_left)),
        is_not_listed(connection),
    )


def movers_of(connection: Connection) -> Movers:
    """The bridges of this database, and whether relays run too."""
    if connection.dialect.name == "sqlite":  # it has no log that a bridge could read
        return Movers()
    through: dict[str, int] = {}
    relays = False
    heard = _m.seen_at > registry.now(connection) - timedelta(seconds=RELAY_GONE_SECONDS)
    for name, kind, detail in connection.execute(
        sa.select(_m.name, _m.kind, _m.detail).where(sa.or_(_m.kind == "bridge", sa.and_(_m.kind == "relay", heard)))
    ):
        relays = relays or kind == "relay"
        if kind == "bridge":
            through[str(name)] = int(json.loads(detail).get("read_through_us", 0))
    if not through:
        return Movers()
    slowest = min(through, key=through.__getitem__)
    return Movers(slowest, through[slowest], marks=relays)


def has_moved(connection: Connection, until_us: int) -> bool:
    """Whether everything committed until the instant has left the database."""
    movers = movers_of(connection)
    if movers.slowest and movers.read_through_us < until_us:
        return False
    if movers.slowest and not movers.marks:
        return True
    waiting = sa.select(_t.transaction_id).where(is_waiting, _t.decided_at < moment_of(until_us)).limit(1)
    return connection.execute(waiting).first() is None
