"""The ranges of a service's table that are read in parallel, chosen by the database's own estimates of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa

from notify.spark.inputs.expressions import Expressions
from notify.spark.inputs.ranges import (
    FIRST_ID,
    LAST_ID,
    MOST_PARTS,
    ROWS_A_PART,
    Span,
    conditions_of,
    edges_by_rows,
    id_at,
    made_us,
)
from notify.storage.sql.rows import microseconds_of, text_of


class TableParts:
    """The parts of one database's tables."""

    def __init__(
        self,
        kind: str,
        reading: Callable[[], AbstractContextManager[sa.Connection]],
        in_schema: Callable[[str], str] = str,
    ) -> None:
        """`kind`: postgresql, mysql or sqlite. `reading` opens a connection. `in_schema`: a table's name in SQL."""
        self._kind = kind
        self._reading = reading
        self._in_schema = in_schema

    def by_id(self, column: sa.Column[Any], span: Span | None) -> list[str]:
        """Edges of ranges of ids, which are in order of time.

        Without a `span` the first and the last range are open (""), so that they also include texts that are not ids.
        """
        within = sa.and_(column >= FIRST_ID, column < LAST_ID)
        if span is not None:
            within = sa.and_(column >= id_at(span.start_us), column < id_at(span.end_us))
        low, high = (made_us(text) for text in self._extent(column, within))
        inner: list[str] = []
        if low is not None and high is not None:
            edges = self.edges(column, low // 1000, high // 1000 + 1, lambda ms: id_at(1000 * ms))
            inner = [id_at(1000 * ms) for ms in edges[1:-1]]
        ends = ("", "") if span is None else (id_at(span.start_us), id_at(span.end_us))
        return [ends[0], *inner, ends[1]]

    def by_time(self, column: sa.Column[Any], span: Span | None) -> list[str]:
        """Edges of ranges of a column of instants; only the start of `span` counts."""
        start = text_of(span.start_us) if span is not None else ""
        is_instant = Expressions(self._kind).is_instant(column.name)
        within: sa.ColumnElement[bool] = sa.literal_column(is_instant, sa.Boolean())
        if start:
            within = sa.and_(within, column >= sa.literal_column(f"'{start}'"))
        first, last = self._extent(column, within)
        if first is None:
            return [start, ""]
        edges = self.edges(column, microseconds_of(first), microseconds_of(last) + 1, text_of)
        return [start, *[text_of(edge) for edge in edges[1:-1]], ""]

    def edges(
        self, column: sa.Column[Any], low: int, high: int, text: Callable[[int], str], most: int = MOST_PARTS
    ) -> list[int]:
        """Edges of at most `most` parts of [low, high), see `edges_by_rows`. `text`: the column's value of a number."""
        with self._reading() as connection:

            def rows_between(start: int, end: int) -> int:
                (condition,) = conditions_of(column.name, [text(start), text(end)])
                return self._estimated(connection, self._in_schema(column.table.name), condition)

            return edges_by_rows(low, high, rows_between, most)

    def _estimated(self, connection: sa.Connection, table: str, condition: str) -> int:
        """About how many rows of a table meet a condition, by the database's own plan."""
        if self._kind == "sqlite":  # SQLite has no estimates
            first_rows = f"SELECT 1 FROM {table} WHERE {condition} LIMIT {2 * ROWS_A_PART}"
            return int(connection.exec_driver_sql(f"SELECT count(*) FROM ({first_rows})").scalar_one())
        query = f"SELECT 1 FROM {table} WHERE {condition}"
        if self._kind == "mysql":
            # MySQL 9 would answer with a tree (`explain_format`).
            plan = connection.exec_driver_sql(f"EXPLAIN FORMAT=TRADITIONAL {query}").mappings().first()
            return int(plan["rows"] or 0) if plan is not None else 0
        answer = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {query}").scalar_one()
        plans = json.loads(answer) if isinstance(answer, str) else answer
        return int(plans[0]["Plan"]["Plan Rows"])

    def _extent(self, column: sa.Column[Any], within: sa.ColumnElement[bool]) -> tuple[Any, Any]:
        """The lowest and the highest value of a column; None if it has no value."""
        with self._reading() as connection:
            first, last = connection.execute(sa.select(sa.func.min(column), sa.func.max(column)).where(within)).one()
            return first, last
