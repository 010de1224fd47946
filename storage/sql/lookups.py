"""Reads the rows of transactions by their ids, on the caller's connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.protocol import ids
from notify.protocol.keys import tag_hash
from notify.protocol.large_bodies import PLACE, mentioned
from notify.storage.records import State, StoredMessage, Transaction
from notify.storage.sql.rows import microseconds_of, payload_of
from notify.storage.sql.tables import server_half_message

IDS_A_STATEMENT = 500
_t = server_half_message.c


def first_message(transaction_id: bytes) -> Any:
    """The condition for the row of a transaction's first message."""
    return sa.and_(_t.transaction_id == ids.to_text(transaction_id), _t.message_no == 0)


def first_rows(connection: Connection, names: Sequence[str], column: Any) -> dict[str, str]:
    """A column of the first row of each existing transaction, by id."""
    known: dict[str, str] = {}
    for first in range(0, len(names), IDS_A_STATEMENT):
        some = names[first : first + IDS_A_STATEMENT]
        rows = connection.execute(
            sa.select(_t.transaction_id, column).where(_t.transaction_id.in_(some), _t.message_no == 0)
        )
        known.update((str(r[0]), str(r[1])) for r in rows)
    return known


def rows_by_id(connection: Connection, names: Sequence[str], *, bodies: bool = True) -> dict[str, list[Any]]:
    """All rows of transactions, in message order; without `bodies` these are NULL."""
    columns = [_t[name] if bodies or name != "body" else sa.null().label(name) for name in _t.keys()]  # noqa: SIM118
    by_id: dict[str, list[Any]] = {}
    for first in range(0, len(names), IDS_A_STATEMENT):
        rows = connection.execute(
            sa.select(*columns)
            .where(_t.transaction_id.in_(names[first : first + IDS_A_STATEMENT]))
            .order_by(_t.transaction_id, _t.message_no)
        ).mappings()
        for row in rows:
            by_id.setdefault(str(row["transaction_id"]), []).append(row)
    return by_id


BODIES_AT_ONCE = 2_000


def stored_bodies(connection: Connection, after: str) -> tuple[set[str], str]:
    """The stored bodies that the next transactions' rows name, and the id of the last transaction, or ""."""
    ids_at_once = sa.select(_t.transaction_id).where(_t.transaction_id > after, _t.message_no == 0)
    names = list(connection.scalars(ids_at_once.order_by(_t.transaction_id).limit(BODIES_AT_ONCE)))
    if not names:
        return set(), ""
    naming = sa.select(_t.body).where(
        _t.transaction_id > after, _t.transaction_id <= names[-1], _t.headers.contains(PLACE, autoescape=True)
    )
    bodies = [bytes(body or b"") for body in connection.scalars(naming)]
    found = {name for body in bodies for name in mentioned(body)}
    return found, "" if len(names) < BODIES_AT_ONCE else str(names[-1])


def transaction_of(rows: Sequence[Any], shard: str) -> Transaction:
    """Make a transaction from its rows."""
    first = rows[0]
    transaction_id = ids.from_text(first["transaction_id"])
    decided_us = microseconds_of(first["decided_at"])
    return Transaction(
        transaction_id,
        first["producer_group"],
        State[first["state"]],
        microseconds_of(first["created_at"]),
        decided_us,
        first["source"],
        first["instance"],
        first["attempts"],
        first["next_check_us"] or 0,
        [
            StoredMessage(
                row["topic"], 0, 0, transaction_id, row["message_no"], decided_us, payload_of(row), tag_hash(row["tag"])
            )
            for row in rows
        ],
        shard,
    )
