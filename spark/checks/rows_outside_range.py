"""Strays: local rows with ids from before the range of a watch, although they were written in it."""

from __future__ import annotations

import contextlib

import sqlalchemy as sa

from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.spark.inputs.databases import Database
from notify.spark.inputs.expressions import Expressions
from notify.spark.inputs.ranges import EPOCH_US, id_at
from notify.spark.result import Found
from notify.storage.sql.rows import microseconds_of, text_of

MOST = 1000
"""The most strays that are reported; further ones are not counted."""


def strays(database: Database, from_us: int, slack_us: int) -> list[Found]:
    """A finding MISDATED for each local row written from `from_us` on whose id is from before it.

    The id must be more than `slack_us` older than the row. Tombstones are left out, because a check may be answered
    long after its half. Reads all rows with older ids that were not purged.
    """
    if half_message.name not in database.tables:
        return []
    table = half_message.c
    transaction_id, created_at = table.transaction_id, table.created_at
    written = [
        sa.and_(transaction_id < id_at(from_us), created_at >= _literal(text_of(from_us + slack_us))),
        sa.and_(transaction_id < id_at(from_us - slack_us), created_at >= _literal(text_of(from_us))),
    ]
    query = sa.select(transaction_id, table.message_no, table.topic, table.producer_group, created_at)
    query = query.where(transaction_id >= id_at(EPOCH_US), table.state != "ROLLED_BACK", sa.or_(*written))
    query = query.where(sa.literal_column(Expressions(database.kind).is_instant("created_at"), sa.Boolean()))
    with database.reading() as connection:
        rows = connection.execute(query.order_by(transaction_id, table.message_no).limit(MOST)).all()
    return [_found(database.name, *row) for row in rows if _is_id(row[0])]  # malformed.py reports the others


def _literal(instant: str) -> sa.ColumnElement[str]:
    return sa.literal_column(f"'{instant}'")


def _is_id(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ids.from_text(text))
    return False


def _found(database: str, transaction: str, number: int, topic: str, group: str, created_at: object) -> Found:
    at_us = microseconds_of(created_at)
    hours = (at_us / 1000 - ids.milliseconds(ids.from_text(transaction))) / 3.6e6
    text = (
        f"the local row was written {hours:,.2f} hours after its id was made, and the id lies before the range of this "
        "watch: the watch did not check whether its message was sent; run notify audit explain"
    )
    return Found(
        "MISDATED", transaction, number, text, topic, producer_group=group, at_us=at_us, database=database,
        evidence={"t_us": at_us},
    )  # fmt: skip
