"""The verdict of an audit: FINDINGS, INCONCLUSIVE with the reasons, or PASS."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from notify.spark.result import Plan, Result
from notify.spark.times import instant_text

LIVE_US = 60_000_000
"""An input whose newest record is at most this old is live."""
MANY = 10
"""From this many messages on: if no message is known to both sides, the inputs do not belong together."""


def judge(plan: Plan, result: Result, newest_row_us: int) -> None:
    """Set the result's verdict, and add the reasons why it is inconclusive.

    `newest_row_us`: the newest local row's time, in microseconds since 1970.
    """
    now_us = time.time_ns() // 1000
    longest_us = round(plan.max_transaction_seconds * 1e6)
    totals = result.totals
    if not totals["rows"]:
        result.reasons.append("no local row lies in the audited range: the messages cannot be compared with anything")
    if not totals["in_queues"]:
        result.reasons.append("no queue has a message in the audited range")
    belongs = any(line.kind == "source" and line.is_whole for line in result.coverage)
    if not belongs and totals["committed"] >= MANY and totals["in_queues"] and not totals["queued"]:
        result.reasons.append(
            f"none of {totals['committed']} committed messages is in a queue, and none of {totals['in_queues']} "
            "messages in queues was committed in a given database: these inputs may not belong together"
        )
    if result.counts.get("PENDING"):
        result.reasons += _stale(plan, result, newest_row_us, now_us)
    if plan.to_us and result.closed_us < min(plan.to_us, now_us - longest_us - 60_000_000):
        result.reasons.append(
            f"transactions after {instant_text(result.closed_us)} are not closed yet, and --to is later"
        )
    if result.counts.get("PENDING"):
        result.judges_all_us = _judges_all_us(plan, result, now_us)
    if totals["rows"] and not totals["closed"] and result.counts.get("PENDING"):
        slowest = min(result.inputs, key=lambda entry: int(entry["watermark_us"]))
        result.reasons.append(
            f"every transaction in the audited range is still PENDING; {slowest['input']} ends at "
            f"{instant_text(slowest['watermark_us'])}{_until(plan, result, slowest, now_us)}"
        )
    result.verdict = "FINDINGS" if result.has_findings else "INCONCLUSIVE" if result.reasons else "PASS"


def _judges_all_us(plan: Plan, result: Result, now_us: int) -> int:
    """From when on all that is PENDING is older than a transaction may last; 0 where an input ends before that."""
    pending = [bucket["at_us"] for bucket in result.buckets if bucket.get("PENDING")]
    longest_us = round(plan.max_transaction_seconds * 1e6)
    slowest_us = min((int(entry["watermark_us"]) for entry in result.inputs), default=0)
    if not pending or now_us - slowest_us > LIVE_US:
        return 0
    skew_us = min(LIVE_US, max(0, slowest_us - longest_us - result.closed_us))  # that of the databases' clocks
    judges_us = max(pending) + result.bucket_us + longest_us + skew_us
    return judges_us if judges_us > now_us else 0


def _until(plan: Plan, result: Result, slowest: Mapping[str, Any], now_us: int) -> str:
    """From when on an audit can judge, in words."""
    longest = f"--max-transaction-seconds {plan.max_transaction_seconds:g}"
    if result.judges_all_us:
        return (
            f". A transaction is judged only once the longest possible one has ended ({longest}): from "
            f"{instant_text(result.judges_all_us)} on an audit can judge all of them; name a shorter time if none "
            "takes that long"
        )
    if now_us - int(slowest["watermark_us"]) > LIVE_US:
        return f", and no later time helps: {slowest['input']} has to catch up first, or a newer copy of it is needed"
    return ""


def _stale(plan: Plan, result: Result, newest_row_us: int, now_us: int) -> Iterator[str]:
    """Reasons why some transactions are PENDING: the inputs that end before the others."""
    longest_us = round(plan.max_transaction_seconds * 1e6)
    for entry in result.inputs:
        until_us = entry["watermark_us"]
        if entry.get("is_copy"):
            # `until_us` is 0 if nobody knows how current the copy is; another reason says so.
            if until_us and (plan.closes_by_clock or now_us - until_us > longest_us):
                yield (
                    f"{entry['input']} is a copy, which has what its primary committed until {instant_text(until_us)}: "
                    "later commits cannot be judged"
                )
        elif plan.closes_by_clock and not entry.get("is_shipped"):
            continue  # a watch reports a stalled input, which hides nothing
        elif min(newest_row_us, now_us) - until_us > longest_us:
            yield (
                f"{entry['input']} ends at {instant_text(until_us)}, and the databases have transactions until "
                f"{instant_text(newest_row_us)}: it is stale, and the time in between cannot be judged"
            )
