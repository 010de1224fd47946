"""Undecided transactions in a database: found by the index of checks, and counted without reading their messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.storage.records import InDoubt, State
from notify.storage.sql.rows import microseconds_of
from notify.storage.sql.tables import server_half_message
from notify.storage.transactions import COUNTED_TO

MOST_GROUPS = 1000
_t = server_half_message.c
_open = sa.and_(_t.next_check_us.is_not(None), _t.message_no == 0)
OLDEST_FIRST = (_t.created_at, _t.transaction_id)


def condition(connection: Connection, state: State | None = None, producer_group: str | None = None) -> Any:
    """The condition for the first rows of undecided transactions, with which the database does not read the decided
    ones, of which there may be millions."""
    wanted = [_open]
    if state is not None:
        wanted.append(_t.state == state.name)
    if producer_group is not None:
        wanted.append(_t.producer_group == producer_group)
    elif connection.dialect.name in ("mysql", "mariadb"):
        # Their index has the decided rows too, so it is read for one producer group after another, after those rows.
        groups = connection.scalars(sa.select(_t.producer_group).distinct().limit(MOST_GROUPS)).all()
        if len(groups) < MOST_GROUPS:
            wanted.append(_t.producer_group.in_(groups))
    return sa.and_(*wanted)


def in_doubt(connection: Connection) -> InDoubt:
    """The number of undecided transactions, counted up to a bound."""
    prepared, parked = _count(connection, State.PREPARED), _count(connection, State.PARKED)
    wanted = condition(connection, State.PREPARED)
    oldest = sa.select(_t.created_at, _t.producer_group).where(wanted).order_by(*OLDEST_FIRST).limit(1)
    row = connection.execute(oldest).first()
    since_us, group = (0, "") if row is None else (microseconds_of(row[0]), str(row[1]))
    return InDoubt(prepared, parked, since_us, group, COUNTED_TO)


def _count(connection: Connection, state: State) -> int:
    some = sa.select(_t.transaction_id).where(condition(connection, state)).limit(COUNTED_TO).subquery()
    return int(connection.scalar(sa.select(sa.func.count()).select_from(some)) or 0)


def sum_of(parts: Sequence[InDoubt]) -> InDoubt:
    """The sum over several databases."""
    begun = [part for part in parts if part.oldest_us]
    oldest = min(begun, key=lambda part: part.oldest_us, default=InDoubt(0, 0))
    prepared, parked = sum([part.prepared for part in parts]), sum([part.parked for part in parts])
    return InDoubt(prepared, parked, oldest.oldest_us, oldest.oldest_group, COUNTED_TO)
