"""Audits one database and one log, for most tests."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pyspark.sql import SparkSession

from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs, Plan, Result
from tests.support.clock import eventually

PLAN = Plan(max_transaction_seconds=5, deliver_seconds=5)
"""A plan for runs that ended long ago."""

AT_ONCE = Plan(max_transaction_seconds=1, deliver_seconds=1)
"""A plan for transactions of a moment ago, after `wait_until_closed`."""


def wait_until_closed(database: Database, plan: Plan) -> None:
    """Wait until everything before this call is older than the longest transaction, by both clocks."""
    done_us = time.time_ns() // 1000
    bound_us = plan.max_transaction_seconds * 1_000_000 + abs(database.clock_offset_us)
    eventually(lambda: database.now_us - bound_us > done_us, "what was done to be older than a transaction may be")


def audited(spark: SparkSession, url: str, log: Path, scratch: Path, plan: Plan = PLAN) -> Result:
    """Audit; `scratch` keeps the copies of the log's segments for another audit of the same log."""
    with contextlib.closing(Database(url, "shop")) as database:
        return Audit(spark, plan, Inputs([database], [LogInput(log)]), scratch).run()


def found(result: Result) -> dict[str, set[str]]:
    """The message ids of each class."""
    classes: dict[str, set[str]] = {}
    for case in result.found:
        classes.setdefault(case.finding, set()).add(case.message_id)
    assert {name: len(several) for name, several in classes.items()} == {
        name: count for name, count in result.counts.items() if count and name != "PENDING"
    }
    return classes
