"""An audit that can judge nothing yet says from when on it can."""

from __future__ import annotations

import time

from notify.spark.judge.verdict import LIVE_US, judge
from notify.spark.result import Plan, Result

SECOND = 1_000_000
PLAN = Plan(max_transaction_seconds=600)


def judged(*, ago_s: float, watermark_ago_s: float = 0, closed: int = 0, pending: int = 3) -> tuple[Result, int]:
    """The result of an audit of transactions of some seconds ago, and now."""
    now_us = time.time_ns() // 1000
    at_us = now_us - round(ago_s * SECOND)
    watermark_us = now_us - round(watermark_ago_s * SECOND)
    result = Result(bucket_us=SECOND)
    result.totals = {"rows": 10, "closed": closed, "in_queues": 10, "committed": 10, "queued": 10}
    result.counts = {"PENDING": pending}
    result.buckets = [{"at_us": at_us, "PENDING": pending}]
    result.inputs = [
        {"input": "log data", "watermark_us": watermark_us},
        {"input": "database shop", "watermark_us": now_us},
    ]
    result.closed_us, result.to_us = watermark_us - 600 * SECOND, now_us
    judge(PLAN, result, at_us)
    return result, now_us


def test_where_all_is_pending_the_report_says_from_when_on_it_can_judge() -> None:
    result, now_us = judged(ago_s=60)
    assert abs(result.judges_all_us - (now_us + 540 * SECOND)) <= 2 * SECOND
    (reason,) = result.reasons
    assert "still PENDING" in reason and "an audit can judge all of them" in reason
    assert "--max-transaction-seconds 600" in reason and (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)


def test_where_a_part_is_pending_the_result_says_so_too() -> None:
    result, now_us = judged(ago_s=60, closed=7)
    assert result.judges_all_us > now_us and result.reasons == [] and result.verdict == "PASS"


def test_an_input_that_ended_is_not_waited_for() -> None:
    result, _ = judged(ago_s=900, watermark_ago_s=1000 + LIVE_US / SECOND)
    assert result.judges_all_us == 0
    said = "no later time helps: log data has to catch up first"
    assert any(said in reason for reason in result.reasons), result.reasons


def test_an_input_without_a_message_proves_nothing() -> None:
    for missing, said in (("rows", "no local row"), ("in_queues", "no queue has a message")):
        result, now_us = judged(ago_s=900, closed=10, pending=0)
        result.totals[missing], result.reasons = 0, []
        judge(PLAN, result, now_us)
        assert result.verdict == "INCONCLUSIVE" and any(said in reason for reason in result.reasons), result.reasons


def test_judges_all_ignores_messages_pending_for_other_reasons() -> None:
    result, _ = judged(ago_s=9000, closed=7)
    assert result.judges_all_us == 0
