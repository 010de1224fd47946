"""`--continue`: an audit reads what came since the last one, and says what it rests on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notify.cli.audit_inputs import is_small
from notify.errors import InvalidRequest
from notify.spark import session
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge import continue_from
from notify.spark.result import Plan, Result
from tests.audit.trade import COUNT, WITH_INBOX, Trade, make_trade

SECOND_US = 1_000_000
PLAN = Plan(max_transaction_seconds=60, deliver_seconds=10)
"""The log of the trade ends 60 s after its last transaction: of the last 10 s not all is judged."""
JUDGED = 90


def go_on(spark: Any, trade: Trade, report: Path, plan: Plan = PLAN) -> tuple[Result, Plan]:
    """Audit with --continue; the result, and the plan that it chose."""
    with trade.inputs() as inputs:
        chosen, before = continue_from.begun(plan, report, inputs, goes_on=True)
        result = Audit(spark, chosen, inputs, report / "segments").run()
        continue_from.conclude(report, chosen, inputs, result, before)
        return result, chosen


@pytest.mark.long
def test_an_audit_reads_what_came_since_the_last_one(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trade, report = make_trade(tmp_path / "trade", step_us=SECOND_US, count=100), tmp_path / "report"
    first, plan = go_on(spark, trade, report)
    assert (first.verdict, first.totals["committed"], plan) == ("PASS", 100, PLAN)
    for n in (3, 95):  # one that was judged, and one that was not closed or due
        trade.execute(WITH_INBOX, f"DELETE FROM notify_inbox WHERE message_id = '{trade.message(n)}'")
    read: list[Any] = []
    asked = Database.producer_groups
    monkeypatch.setattr(Database, "producer_groups", lambda self, span=None: (read.append(span), asked(self, span))[1])
    second, plan = go_on(spark, trade, report)
    assert trade.at(JUDGED - 5) < plan.from_us < trade.at(JUDGED + 1)
    assert [case.message_id for case in second.found] == [trade.message(95)]
    assert 9 <= second.totals["committed"] <= 15, "the rest was not read"
    assert read and all(span is not None for span in read), "no table is asked for all its producer groups"
    (note,) = [text for text in second.notes if "continues where the audit of" in text]
    assert "1 audits judged 100 messages committed" in note and "with no finding" in note
    third, _ = go_on(spark, trade, report)
    assert [text for text in third.notes if "2 audits judged" in text and "with 1 ACKED_NO_EFFECT" in text], third.notes


@pytest.mark.long
def test_it_goes_on_only_with_the_same_inputs(tmp_path: Path) -> None:
    trade, other, report = make_trade(tmp_path / "trade"), make_trade(tmp_path / "other", 2), tmp_path / "report"
    with trade.inputs() as inputs, other.inputs() as others:
        assert continue_from.begun(PLAN, report, inputs, goes_on=True) == (PLAN, None), "the first one reads everything"
        in_doubt = Result(reasons=["a segment is missing"])
        continue_from.conclude(report, PLAN, inputs, in_doubt, None)
        continue_from.conclude(report, replace(PLAN, to_us=7), inputs, Result(), None)
        assert continue_from.begun(PLAN, report, inputs, goes_on=True)[1] is None, "neither proves anything"
        continue_from.conclude(report, PLAN, inputs, Result(judged_us=7, counts={"LOST": 2, "PENDING": 3}), None)
        chosen, before = continue_from.begun(PLAN, report, inputs, goes_on=True)
        assert before is not None and (chosen.from_us, before.counts) == (7, {"LOST": 2})
        assert continue_from.begun(PLAN, report, inputs, goes_on=False) == (PLAN, None)
        with pytest.raises(InvalidRequest, match="leave --from and --to out"):
            continue_from.begun(replace(PLAN, from_us=5), report, inputs, goes_on=True)
        with pytest.raises(InvalidRequest, match="the earlier audits had other databases"):
            continue_from.begun(PLAN, report, replace(inputs, databases=others.databases), goes_on=True)
        replaced = [LogInput(other.log, trade.log.name)]
        with pytest.raises(InvalidRequest, match=r"lacks the segment at \d+ that an audit has read"):
            continue_from.begun(PLAN, report, replace(inputs, logs=replaced), goes_on=True)
        (report / continue_from.FILE).write_text("{")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            continue_from.begun(PLAN, report, inputs, goes_on=True)


@pytest.mark.long
def test_a_continued_audit_reads_only_a_small_part_of_a_large_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark then starts for little work."""
    trade = make_trade(tmp_path / "trade")
    with trade.inputs() as inputs:
        whole = sum(segment.size for segment in inputs.logs[0].segments)
        monkeypatch.setattr(session, "SMALL_BYTES", whole // 3)
        assert not is_small(inputs) and not is_small(inputs, trade.at(COUNT // 3))
        assert is_small(inputs, trade.at(COUNT * 9 // 10))
