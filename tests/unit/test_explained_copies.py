"""Verdicts on one message where a database is a copy: what the copy may lack is neither wrong nor right."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("pyspark")

from notify.protocol import ids
from notify.spark.explain.explained import Explained
from notify.spark.explain.judging import Bounds, judge
from notify.spark.explain.trace import Row, Settled, Stand, Trace
from notify.spark.inputs.columns import name_hash
from notify.spark.judge.terms import Terms

MESSAGE = ids.message_id(ids.new_id(), 0)
AT_US = time.time_ns() // 1000
MINUTE_US = 60_000_000
SHOP = "0d9b0c1a4c7f4b58a94f2f8f3a9e2b11"
WHY = "database shop follows another one: its replication leaves out changes of shop.notify_inbox"


def bounds(until_us: int, why: str = "") -> Bounds:
    terms = Terms(
        closed_before_us=until_us or AT_US + MINUTE_US, settled_before_us=AT_US + MINUTE_US,
        covered_groups=frozenset({name_hash("shop")}), inbox_groups=frozenset({"points"}), inbox_until_us=until_us,
    )  # fmt: skip
    return Bounds(terms, ("shop",), {name_hash(SHOP): 0}, unseen=(why,) if why else ())


def acked(*, has_row: bool = True) -> Trace:
    row = Row("shop", "", "COMMITTED", "orders", None, AT_US, "shop")
    return Trace(
        MESSAGE, rows=[row] if has_row else [], producer_group="shop", outcomes={"COMMITTED"}, half_us=AT_US,
        stands=[Stand("log main", "orders", 0, 1, AT_US)], expected={"points"},
        settled={"points": Settled("ACK", AT_US)}, source=name_hash(SHOP),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("until_us", "why", "finding", "code"),
    [
        (0, "", "ACKED_NO_EFFECT", 1),
        (1, WHY, "INCONCLUSIVE", 2),
        (AT_US - 1, "", "PENDING", 0),
        (AT_US + 1, "", "ACKED_NO_EFFECT", 1),
    ],
    ids=["no copy", "not known", "before it", "after it"],
)
def test_an_effect_that_a_copy_may_lack(until_us: int, why: str, finding: str, code: int) -> None:
    """Nothing was wrong with it."""
    verdict = judge(acked(), bounds(until_us, why))
    assert (verdict.finding, why in verdict.sentence) == (finding, True), verdict.sentence
    assert Explained([verdict], [], [], [], "").exit_code == code


def test_a_local_row_that_a_copy_may_lack() -> None:
    """It was PENDING for good, with exit code 0."""
    verdict = judge(acked(has_row=False), bounds(1, WHY))
    assert verdict.finding == "INCONCLUSIVE" and WHY in verdict.sentence, verdict.sentence
    assert judge(acked(has_row=False), bounds(0)).finding == "GHOST"
