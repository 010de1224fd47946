"""Failure groups: what dead letters have in common is told by their reasons, and a bounded number of groups is kept."""

from __future__ import annotations

import time

import pytest

from notify.server.letters.failures import MOST_FAILURES, MOST_TOPICS, Failures, kind_of


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ValueError: no 7 (at shop.add:41)", "ValueError: gone (at shop.add:57)", True),
        ("ValueError: no 7 (at shop.add:41)", "KeyError: no 7 (at shop.add:41)", False),
        ("ValueError: no 7 (at shop.add:41)", "ValueError: no 7 (at shop.pay:41)", False),
        ("no customer 7", "no customer 12345", True),
        ("no customer 'Ann'", "no customer 'Bob Lee'", True),
        ("no customer", "no order", False),
        ("3 attempts, the last one's lease ran out", "16 attempts, the last one's lease ran out", True),
        ("order 019aa4b7-0000-7000-8000-000000000001", "order 019aa4b7-ffff-7000-8000-00000000abcd", True),
        ("", "", True),
    ],
)
def test_letters_of_one_cause_have_one_fingerprint(one: str, other: str, same: bool) -> None:
    assert (kind_of(one).fingerprint == kind_of(other).fingerprint) == same


def test_a_reason_is_taken_apart() -> None:
    kind = kind_of("sqlalchemy.exc.DataError: 'x' is too long, (at shop.points.add.<locals>.inner:41)")
    assert (kind.type, kind.place) == ("sqlalchemy.exc.DataError", "shop.points.add.<locals>.inner")
    assert kind.text == "# is too long,"
    assert kind_of("(at the end)").place == "" == kind_of("two words: no type").type


def test_no_reason_takes_long() -> None:
    """A reason is whatever a consumer sends."""
    began = time.thread_time()
    for text in ("'" * 500, '"a' * 250, "a1-" * 166, " (at a" * 83, "(at " + "x" * 490 + ":1)", "A." * 250):
        kind_of(text)
    assert time.thread_time() - began < 0.5


def test_failures_are_counted_within_bounds() -> None:
    failures = Failures()
    for n in range(MOST_FAILURES + 5):
        for topic in range(MOST_TOPICS + 5):
            place = f"E: x (at shop.f{n}:{topic + 1})"
            failures.note(place, f"{n}.{topic}", f"t{topic}", 100 + topic, is_closed=topic == 0, may_grow=True)
    assert (len(failures.by_fingerprint), failures.others) == (MOST_FAILURES, 5 * (MOST_TOPICS + 5))
    failures.closed("E: x (at shop.f7:9)")
    first = failures.listed()[0]
    assert (first.count, first.closed, len(first.topics)) == (MOST_TOPICS + 5, 1, MOST_TOPICS)
    assert (first.first_us, first.last_us, first.example_id) == (100, 114, f"{first.example_id.split('.')[0]}.14")
    assert failures.listed()[-1].kind.place == "shop.f7"
    failures.note("a new cause", "id", "t", 1, is_closed=False, may_grow=False)
    assert failures.others == 5 * (MOST_TOPICS + 5) + 1
