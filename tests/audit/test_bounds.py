"""The queries of an audit read whole tables: their bound is one that a large table does not reach."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.errors import Unavailable
from notify.spark.inputs.databases import Database
from notify.spark.inputs.ranges import ROWS_A_PART, edges_by_rows
from tests.support.databases import empty_database

OWN = "SELECT current_setting('statement_timeout') AS message_id"


@pytest.mark.long
def test_a_servers_bound_and_the_databases_own_do_not_end_a_read(
    spark: Any, database_urls: dict[str, str], tmp_path: Path
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {engine.url.database} SET statement_timeout = '200ms'")
        engine.dispose()
        with contextlib.closing(Database(url, "shop")) as database:
            assert database.rows(OWN) == [("1h",)]
            by_spark = database.read_query(spark, f"({OWN}) own", "message_id string").collect()
            assert [row["message_id"] for row in by_spark] == ["1h"]


_LONG = "SELECT count(*) FROM " + ", ".join(f"information_schema.collations {name}" for name in "abc")
SLOW = {
    "postgresql": ("SET statement_timeout = '50ms'", "SELECT pg_sleep(600)"),
    "mysql": ("SET max_execution_time = 50", _LONG),
    "mariadb": ("SET max_statement_time = 0.05", "SELECT count(*) FROM seq_1_to_1000000 a, seq_1_to_1000000 b"),
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_query_that_reaches_the_bound_is_told_with_what_to_do(
    kind: str, database_urls: dict[str, str], tmp_path: Path
) -> None:
    setting, query = SLOW[kind]
    with (
        empty_database(kind, database_urls, tmp_path) as url,
        contextlib.closing(Database(url, "shop")) as database,
        pytest.raises(Unavailable, match=r"database shop: .*longer than it may.*--from"),
        database.reading() as connection,
    ):
        connection.exec_driver_sql(setting)
        connection.exec_driver_sql(query)


def test_parts_have_as_many_rows_in_a_burst_as_elsewhere() -> None:
    """A million rows in one second of a day: parts of equal time would put all of them into one."""
    day, burst = 86_400_000, range(40_000_000, 40_001_000)
    asked = []

    def rows_between(low: int, high: int) -> int:
        asked.append((low, high))
        dense = max(0, min(high, burst.stop) - max(low, burst.start)) * 1000
        return dense + (high - low) // 1000

    edges = edges_by_rows(0, day, rows_between)
    assert edges[0] == 0 and edges[-1] == day and edges == sorted(set(edges))
    assert max(map(rows_between, edges, edges[1:])) <= ROWS_A_PART
    assert len(edges) - 1 <= 24, "halving that stops where a part is small enough"
    assert edges_by_rows(0, day, lambda low, high: 10) == [0, day], "a small table is one part, by one question"


def test_the_number_of_parts_and_of_questions_is_bounded() -> None:
    asked = []

    def rows_between(low: int, high: int) -> int:
        asked.append((low, high))
        return 1 << 40

    edges = edges_by_rows(0, 1 << 30, rows_between, most=16)
    assert len(edges) == 17 and len(asked) < 32
    assert edges_by_rows(5, 6, rows_between) == [5, 6], "what cannot be halved is one part"
