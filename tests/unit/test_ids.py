"""Ids as text: a batch is read as its ids are one by one, and a span of time has a range of them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notify.errors import InvalidId
from notify.protocol import ids
from notify.spark.inputs.ranges import EPOCH_US, Span, conditions_of, id_at

IDS = [ids.to_text(ids.new_id()) for _ in range(ids.FEW_IDS + 3)]


def one_by_one(texts: list[str]) -> list[bytes | str]:
    """For each text its bytes, or why it is refused."""
    results: list[bytes | str] = []
    for text in texts:
        try:
            results.append(ids.from_text.__wrapped__(text))
        except InvalidId as error:
            results.append(str(error))
    return results


def together(texts: list[str]) -> list[bytes | str]:
    return [found if isinstance(found, bytes) else str(found) for found in ids.from_texts(texts)]


@st.composite
def damaged(draw: st.DrawFn) -> list[str]:
    """Ids, some characters of which were replaced, added, removed, or moved to the neighbour."""
    texts = list(IDS)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(texts) - 1))
        at = draw(st.integers(0, len(texts[number])))
        replaced = draw(st.integers(0, 2))
        text = draw(st.text("0123456789abcdefABCDEF-\n \t\x00_g\u0663", max_size=2))
        taken = texts[number][at : at + replaced]
        texts[number] = texts[number][:at] + text + texts[number][at + replaced :]
        if draw(st.booleans()):
            texts[number - 1] += taken
    return texts


@settings(deadline=None)  # a loaded machine may take long for one example
@given(damaged())
@example([*IDS[:-1], IDS[-1].upper()])
@example([*IDS[:-1], IDS[-1][:-2] + "  "])
@example([*IDS[:-1], IDS[-1] + "\n"])
@example([*IDS[:-2], IDS[-2] + "\n" + IDS[-1], ""])
def test_a_batch_is_read_as_its_ids_one_by_one(texts: list[str]) -> None:
    assert together(texts) == one_by_one(texts)


def test_batches_of_each_size() -> None:
    for count in range(len(IDS) + 1):
        for texts in (IDS[:count], [*IDS[:count], "no id"]):
            assert together(texts) == one_by_one(texts)


# --- ids of a span of time, in the order in which a database has their texts ----------------------------------------

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
