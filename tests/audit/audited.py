"""An audit of one database and one log, as most tests need it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pyspark.sql import SparkSession

from notify.spark.audit import Audit
from notify.spark.databases import Database
from notify.spark.log_input import LogInput
from notify.spark.result import Inputs, Plan, Result
from tests.support.clock import eventually

PLAN = Plan(max_transaction_seconds=5, deliver_seconds=5)
"""For runs that ended long before these bounds."""

AT_ONCE = Plan(max_transaction_seconds=1, deliver_seconds=1)
"""For what was done a moment ago, see `wait_until_closed`."""


def wait_until_closed(database: Database, plan: Plan) -> None:
    """Until all that was done before this call is older than a transaction may be, by either clock."""
    done_us = time.time_ns() // 1000
    bound_us = plan.max_transaction_seconds * 1_000_000 + abs(database.clock_offset_us)
    eventually(lambda: database.now_us - bound_us > done_us, "what was done to be older than a transaction may be")


def audited(spark: SparkSession, url: str, log: Path, scratch: Path, plan: Plan = PLAN) -> Result:
    """`scratch` keeps the copies of the log's segments, which another audit of the same log may use."""
    with contextlib.closing(Database(url, "shop")) as database:
        return Audit(spark, plan, Inputs([database], [LogInput(log)]), scratch).run()
