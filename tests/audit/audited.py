"""An audit of one database and one log, as most tests need it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pyspark.sql import SparkSession

from spark.audit import Audit
from spark.databases import Database
from spark.log_input import LogInput
from spark.result import Inputs, Plan, Result

PLAN = Plan(max_transaction_seconds=5, deliver_seconds=5)
"""For runs that ended long before these bounds."""


def audited(spark: SparkSession, url: str, log: Path, scratch: Path, plan: Plan = PLAN) -> Result:
    """`scratch` keeps the copies of the log's segments, which another audit of the same log may use."""
    with contextlib.closing(Database(url, "shop")) as database:
        return Audit(spark, plan, Inputs([database], [LogInput(log)]), scratch).run()
