"""Local rows whose ids lie before everything that a watch audits, although they were written since."""

from __future__ import annotations

import contextlib

import sqlalchemy as sa

from notify import ids
from notify.client.table import half_message
from notify.spark.databases import Database
from notify.spark.expressions import Expressions
from notify.spark.ranges import EPOCH_US, id_at
from notify.spark.result import Found
from notify.storage.sql.rows import microseconds_of, text_of

MOST = 1000
"""The most that are named; more of them are not counted."""


def strays(database: Database, from_us: int, slack_us: int) -> list[Found]:
    """MISDATED for each local row written from an instant on with an id of a time before it, by more than `slack_us`.

    A tombstone is left out: a check may be answered long after its half. Reads all rows with older ids, which a purge
    has left.
    """
    if half_message.name not in database.tables:
        return []
    t = half_message.c
    name = t.transaction_id
    written = [
        sa.and_(name < id_at(from_us), t.created_at >= sa.literal_column(f"'{text_of(from_us + slack_us)}'")),
        sa.and_(name < id_at(from_us - slack_us), t.created_at >= sa.literal_column(f"'{text_of(from_us)}'")),
    ]
    columns = (name, t.message_no, t.topic, t.producer_group, t.created_at)
    query = sa.select(*columns).where(name >= id_at(EPOCH_US), t.state != "ROLLED_BACK", sa.or_(*written))
    query = query.where(sa.literal_column(Expressions(database.kind).is_instant("created_at"), sa.Boolean()))
    with database.reading() as connection:
        rows = connection.execute(query.order_by(name, t.message_no).limit(MOST)).all()
    return [_found(database.name, *row) for row in rows if _is_id(row[0])]  # malformed.py reports the others


def _is_id(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ids.from_text(text))
    return False


def _found(database: str, transaction: str, number: int, topic: str, group: str, created_at: object) -> Found:
    at_us = microseconds_of(created_at)
    hours = (at_us / 1000 - ids.milliseconds(ids.from_text(transaction))) / 3.6e6
    text = (
        f"the local row was written {hours:,.2f} hours after its id was made, which is before all that this watch "
        "audits: whether its message was sent was not looked for; notify audit explain says it"
    )
    return Found(
        "MISDATED", transaction, number, text, topic, producer_group=group, at_us=at_us, database=database,
        evidence={"t_us": at_us},
    )  # fmt: skip
