"""An audit asks again once it has read its inputs: for a log that was not given, and for purges beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.purge import purge_by_force
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.result import Plan, Result
from notify.storage.sql.rows import text_of
from tests.audit.audited import PLAN
from tests.audit.plant import edit
from tests.audit.trade import COUNT, WITH_INBOX, Trade


def audited(spark: Any, trade: Trade, plan: Plan = PLAN, progress: Callable[[str], None] = lambda text: None) -> Result:
    with trade.inputs() as inputs:
        return Audit(spark, plan, inputs, trade.directory / "scratch", progress).run()


def found(result: Result) -> dict[str, set[str]]:
    """The message ids of each class."""
    classes: dict[str, set[str]] = {}
    for case in result.found:
        classes.setdefault(case.finding, set()).add(case.message_id)
    assert {name: len(several) for name, several in classes.items()} == {
        name: count for name, count in result.counts.items() if count and name != "PENDING"
    }
    return classes


def of_two_shards(trade: Trade) -> set[int]:
    """Let the shop's rows name two shards, and remove from the log what is in the second one: its numbers."""
    second = {n for n in range(COUNT) if n % 4 == 2}
    listed = ", ".join(f"'{trade.name(n)}'" for n in second)
    trade.execute(
        "shop", "UPDATE half_message SET shards = 'a'",
        f"UPDATE half_message SET shards = 'b' WHERE transaction_id IN ({listed})",
    )  # fmt: skip
    without(trade, second)
    return second


def without(trade: Trade, numbers: set[int]) -> None:
    """Remove transactions from the log, as if it had never had them."""
    gone = {trade.id(n) for n in numbers}
    edit(trade.log, lambda entry: None if entry[48:64] in gone else entry)
    trade.without_index()


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.long), "digest"])
def test_messages_of_a_log_that_was_not_given_are_not_lost(
    spark: Any, trade: Trade, tmp_path: Path, method: str
) -> None:
    second = of_two_shards(trade)
    without(trade, {8})  # of the first shard, whose log is there
    result = audited(spark, trade, replace(PLAN, method=method))
    assert found(result) == {"LOST": {trade.message(8)}}
    assert result.counts["PENDING"] == len(second)
    (reason,) = result.reasons
    assert "shard b" in reason and "--log" in reason
    assert [(line.name, line.kind) for line in result.coverage if not line.is_whole] == [("database shop", "shard")]
    with trade.inputs() as inputs:
        (lost,) = explain(inputs, trade.message(8), tmp_path / "copies", (5, 5)).verdicts
        (away,) = explain(inputs, trade.message(10), tmp_path / "copies", (5, 5)).verdicts
    assert (lost.finding, away.finding) == ("LOST", "INCONCLUSIVE") and "shard b" in away.sentence


def test_rows_that_are_purged_while_they_are_read_are_no_ghosts(spark: Any, trade: Trade) -> None:
    middle_us = trade.at(COUNT // 2)

    def purge(doing: str) -> None:
        if "databases" not in doing:
            return
        engine = sa.create_engine(trade.url("bank"))
        assert purge_by_force(engine, older_than=time.time() - middle_us / 1e6).rows > COUNT // 5
        engine.dispose()
        trade.execute(
            WITH_INBOX,
            f"UPDATE notify_source SET inbox_from = {middle_us // 1000 + 1}",
            f"DELETE FROM notify_inbox WHERE created_at < '{text_of(middle_us)}'",
        )

    result = audited(spark, trade, progress=purge)
    assert (result.verdict, result.reasons, found(result)) == ("PASS", [], {})
    assert [what for what in ("local rows", "inbox rows") if any(what in note for note in result.notes)] == [
        "local rows", "inbox rows",
    ]  # fmt: skip


@pytest.mark.long
def test_a_range_that_is_purged_while_it_is_read_is_not_judged(spark: Any, trade: Trade) -> None:
    middle_us = trade.at(COUNT // 2)

    def purge(doing: str) -> None:
        if "databases" in doing:
            trade.execute(
                "bank",
                f"UPDATE notify_source SET rows_from = {middle_us // 1000 + 1}",
                f"DELETE FROM half_message WHERE created_at < '{text_of(middle_us)}'",
            )

    result = audited(spark, trade, replace(PLAN, from_us=trade.first_us), purge)
    assert (result.verdict, found(result)) == ("INCONCLUSIVE", {})
    assert "purged while the audit read them" in result.reasons[0]
