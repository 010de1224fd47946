"""Rows with values that no version of the SDK writes, such as ids, numbers or times: each of them is a finding.

SQLite keeps a value of any type in any column: there each column of a row is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox, notify_source
from notify.spark.digest.drill import Drill
from notify.spark.inputs.databases import Database
from notify.spark.inputs.expressions import HAS_NUMBER, MOST_NUMBER, Expressions
from notify.spark.inputs.ranges import Span, made_us
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
    cases = list(_sources(database))
    for column, is_sound in (
        (half_message.c.transaction_id, f"{expressions.is_id('transaction_id')} AND {HAS_NUMBER}"),
        (notify_inbox.c.message_id, expressions.is_message_id("message_id")),
    ):
        table = column.table
        if table.name not in database.tables or (span is None and table.name in database.sound):
            continue
        mistyped = database.mistyped(table)
        is_odd = " OR ".join([f"NOT ({is_sound})", *mistyped.values()])
        where = _within(table.name, span, f"({is_odd})", expressions.is_no_instant("created_at"), mistyped)
        where += f" AND {drill.where(column.name)}" if drill and not mistyped else ""
        count, rows = _rows(database, table, column.name, where, mistyped)
        total += count
        cases += [_case(database, table.name, row, list(mistyped)) for row in rows]
    return total + sum(case.evidence["table"] == notify_source.name for case in cases), cases


def _sources(database: Database) -> Iterator[Found]:
    """A case for a row of notify_source of which a value has another type; only SQLite has such rows."""
    mistyped = database.mistyped(notify_source) if notify_source.name in database.tables else {}
    for name, is_odd in mistyped.items():
        table = database.in_schema(notify_source.name)
        for (value,) in database.rows(f"SELECT {name} FROM {table} WHERE {is_odd} LIMIT {MOST_SHOWN}"):
            detail = f"{notify_source.name} has {_shown(value)} in {name}, which no version writes: it is left out"
            evidence = {"id": _shown(value), "table": notify_source.name}
            yield Found("MALFORMED", detail=detail, database=database.name, evidence=evidence)


def _within(table: str, span: Span | None, is_odd: str, is_undated: str, mistyped: Mapping[str, str]) -> str:
    """The condition for odd rows of the span.

    half_message has no index by time, but its key is in order of time: only those ranges of the key are read that have
    ids of the span or ids without a time. A row without a time counts by the time in its id, and one of SQLite without
    a text for its id in each span.
    """
    if span is None:
        return f"({is_odd} OR {is_undated})"
    in_span = f"({is_odd} AND created_at >= '{text_of(span.start_us)}' AND created_at < '{text_of(span.end_us)}')"
    name = "message_id" if table == notify_inbox.name else "transaction_id"
    ranges = span.within(name)
    no_text = [mistyped[name]] if name in mistyped else []
    if table == notify_inbox.name:
        return f"({in_span} OR ({is_undated} AND ({' OR '.join([*ranges, *no_text])})))"
    return f"(({' OR '.join([*ranges, *span.odd(name), *no_text])}) AND ({in_span} OR {is_undated}))"


def _rows(
    database: Database, table: sa.Table, column: str, where: str, mistyped: Mapping[str, str]
) -> tuple[int, Sequence[Any]]:
    more = "producer_group AS name, message_no AS no" if table is half_message else "consumer_group AS name"
    at_us = Expressions(database.kind).microseconds("created_at")
    odd = "".join(f", CASE WHEN {is_odd} THEN 1 ELSE 0 END AS odd_{name}" for name, is_odd in mistyped.items())
    name = database.in_schema(table.name)
    query = f"SELECT {column} AS id, {at_us} AS at_us, {more}{odd} FROM {name} WHERE {where} LIMIT {MOST_SHOWN}"
    rows = database.rows(query)
    count = len(rows)
    if count == MOST_SHOWN:
        count = database.rows(f"SELECT count(*) FROM {name} WHERE {where}")[0][0]
    return count, rows


def _case(database: Database, table: str, row: Any, columns: Sequence[str]) -> Found:
    is_local = table == half_message.name
    name, shown = _plain(row.name), _plain(row.id)
    odd = [column for column in columns if getattr(row, f"odd_{column}")]
    if is_local and not (isinstance(row.no, int) and 0 <= row.no <= MOST_NUMBER):
        detail = f"{table} of {name} has the message number {_shown(row.no)} in {shown[:60]!r}: no message has it"
    elif row.at_us is None:
        detail = f"{table} of {name} has a created_at that is not a time, in {shown[:60]!r}"
    elif odd and not set(odd) & {"transaction_id", "message_id"}:
        detail = f"{table} of {name} has a value of another type in {', '.join(odd)}, in {shown[:60]!r}"
    else:
        kind = "transaction" if is_local else "message"
        detail = f"{table} of {name} has the id {_shown(row.id)}, which is not a {kind} id"
    return Found(
        "MALFORMED", detail=detail, database=database.name, at_us=row.at_us or made_us(shown) or 0,
        producer_group=name if is_local else "", groups=[] if is_local else [name],
        evidence={"id": shown, "table": table},
    )  # fmt: skip


def _plain(value: object) -> str:
    """A value as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _shown(value: object) -> str:
    """A value for people."""
    return repr(value[:60] if isinstance(value, str | bytes) else value)
