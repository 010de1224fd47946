"""Rows with ids, message numbers or times that no version of the SDK writes: each of them is a finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.client.table import half_message, notify_inbox
from notify.spark.databases import Database
from notify.spark.digest.drill import Drill
from notify.spark.expressions import HAS_NUMBER, MOST_NUMBER, Expressions
from notify.spark.ranges import Span, made_us
from notify.spark.result import Found
from notify.storage.sql.rows import text_of

MOST_SHOWN = 1000
"""The most rows of a table that become cases; all are counted."""


def malformed(database: Database, span: Span | None, drill: Drill | None = None) -> tuple[int, list[Found]]:
    """How many malformed rows a database has, and the cases of the first of them.

    `span`: only rows of that time. `drill`: only rows of the drill, because the texts of all other rows were compared.
    """
    expressions = Expressions(database.kind)
    total = 0
    cases: list[Found] = []
    for column, is_sound in (
        (half_message.c.transaction_id, f"{expressions.is_id('transaction_id')} AND {HAS_NUMBER}"),
        (notify_inbox.c.message_id, expressions.is_message_id("message_id")),
    ):
        table = column.table.name
        if table not in database.tables or (span is None and table in database.sound):
            continue
        where = _within(table, span, f"NOT ({is_sound})", expressions.is_no_instant("created_at"))
        where += f" AND {drill.where(column.name)}" if drill else ""
        count, rows = _rows(database, table, column.name, where)
        total += count
        cases += [_case(database, table, row) for row in rows]
    return total, cases


def _within(table: str, span: Span | None, is_odd: str, is_undated: str) -> str:
    """The condition for odd rows of the span.

    half_message has no index by time, but its key is in order of time: only those ranges of the key are read that have
    ids of the span or ids without a time. A row without a time counts by the time in its id.
    """
    if span is None:
        return f"({is_odd} OR {is_undated})"
    in_span = f"({is_odd} AND created_at >= '{text_of(span.start_us)}' AND created_at < '{text_of(span.end_us)}')"
    name = "message_id" if table == notify_inbox.name else "transaction_id"
    ranges = span.within(name)
    if table == notify_inbox.name:
        return f"({in_span} OR ({is_undated} AND ({' OR '.join(ranges)})))"
    return f"({' OR '.join([*ranges, *span.odd(name)])}) AND ({in_span} OR {is_undated})"


def _rows(database: Database, table: str, column: str, where: str) -> tuple[int, Sequence[Any]]:
    more = "producer_group AS name, message_no AS no" if table == half_message.name else "consumer_group AS name"
    at_us = Expressions(database.kind).microseconds("created_at")
    name = database.in_schema(table)
    query = f"SELECT {column} AS id, {at_us} AS at_us, {more} FROM {name} WHERE {where} LIMIT {MOST_SHOWN}"
    rows = database.rows(query)
    count = len(rows)
    if count == MOST_SHOWN:
        count = database.rows(f"SELECT count(*) FROM {name} WHERE {where}")[0][0]
    return count, rows


def _case(database: Database, table: str, row: Any) -> Found:
    is_local = table == half_message.name
    if is_local and not 0 <= row.no <= MOST_NUMBER:
        detail = f"{table} of {row.name} has the message number {row.no} in {row.id[:60]!r}: no message has it"
    elif row.at_us is None:
        detail = f"{table} of {row.name} has a created_at that is no time, in {row.id[:60]!r}"
    else:
        kind = "transaction" if is_local else "message"
        detail = f"{table} of {row.name} has the id {row.id[:60]!r}, which is no {kind} id"
    return Found(
        "MALFORMED", detail=detail, database=database.name, at_us=row.at_us or made_us(row.id) or 0,
        producer_group=row.name if is_local else "", groups=[] if is_local else [row.name],
        evidence={"id": row.id, "table": table},
    )  # fmt: skip
