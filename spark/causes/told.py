"""Tells a result its causes: looks up what they need beside the findings."""

from __future__ import annotations

from pyspark.sql import SparkSession

from notify.spark.causes.commands import Commands
from notify.spark.causes.grouping import causes_of
from notify.spark.causes.settled import last_settled
from notify.spark.causes.standstill import Standstill
from notify.spark.result import Inputs, Plan, Result


def tell_causes(spark: SparkSession, plan: Plan, inputs: Inputs, result: Result, commands: Commands) -> None:
    """Set the causes of an audit's result. The inputs are those of the audit, and still open."""
    queues = [entry["watermark_us"] for entry in result.inputs if entry["kind"] in ("log", "kafka")]
    until_us = min([*queues, result.to_us])
    last = last_settled(spark, inputs, result.found)
    standstill = Standstill(last, until_us - round(plan.deliver_seconds * 1e6))
    result.causes, result.causes_left = causes_of(result, standstill, commands)
