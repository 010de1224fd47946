"""Ids of a span of time, in the order in which a database has their texts."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from itertools import product

import pytest

from notify.spark.inputs.ranges import EPOCH_US, Span, conditions_of, id_at

HOUR_US = 3_600_000_000
STARTS_US = [EPOCH_US, *(1_700_000_000_000_000 + n * 977 * HOUR_US for n in range(24))]
"""Instants whose ids have their first letter in different places."""


def ids_made(start_us: int, end_us: int) -> set[str]:
    """Some ids of a time, with a letter each."""
    return {f"{id_at(us)[:-1]}c" for us in range(start_us, end_us, (end_us - start_us) // 50)}


@pytest.mark.parametrize("collation", ["BINARY", "NOCASE"])
def test_each_id_of_a_span_is_read_once_in_either_case(collation: str) -> None:
    for start_us, length_us in product(STARTS_US, (1_000_000, HOUR_US, 900 * HOUR_US)):
        span = Span(start_us, start_us + length_us, ahead_us=start_us + 2 * length_us)
        within = ids_made(span.start_us, span.end_us)
        wanted = within | {text.upper() for text in within}
        earlier = ids_made(max(EPOCH_US, start_us - length_us), start_us) if start_us > EPOCH_US else set()
        conditions = conditions_of("id", [id_at(span.start_us), id_at(span.end_us)])
        conditions += span.upper_case("id") + span.odd("id")
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.execute(f"CREATE TABLE messages (id TEXT COLLATE {collation})")
            database.executemany("INSERT INTO messages VALUES (?)", [(text,) for text in wanted | earlier])
            queries = [f"SELECT id FROM messages WHERE {condition}" for condition in conditions]
            read = Counter(text for query in queries for (text,) in database.execute(query))
        assert read == Counter(wanted), (start_us, length_us)
