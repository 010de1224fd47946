"""Dead letters that nobody sent again: messages that a group gave up, counted by group and reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify import ids
from notify.spark.log_input import LogInput
from notify.spark.result import Found
from notify.spark.small_table import small_table

MOST_SHOWN = 1000
"""The most letters that are shown; all are counted."""
MOST_REASONS = 100
"""The most pairs of group and reason that are counted apart."""


@dataclass
class Dead:
    """The dead letters of one log."""

    count: int = 0
    by_reason: list[dict[str, Any]] = field(default_factory=list)
    """Rows of group, reason and count, the most frequent first."""
    cases: list[Found] = field(default_factory=list)


def dead(spark: SparkSession, log: LogInput, from_us: int, to_us: int) -> Dead:
    """The dead letters of a log from [from_us, to_us), in microseconds, that were neither sent again nor purged."""
    letters = log.letters(spark)
    if letters is None:
        return Dead()
    waiting = _waiting(spark, log, letters.where((F.col("at_us") >= from_us) & (F.col("at_us") < to_us)))
    waiting.persist()
    try:
        counted = waiting.groupBy("group", "reason").count().orderBy(F.desc("count"), "group", "reason")
        reasons = [row.asDict() for row in counted.limit(MOST_REASONS).collect()]
        total = sum(row["count"] for row in reasons) if len(reasons) < MOST_REASONS else waiting.count()
        rows = waiting.orderBy("at_us", "id", "no").limit(MOST_SHOWN).collect()
    finally:
        waiting.unpersist()
    cases = [
        Found(
            "DEAD", ids.to_text(bytes(row["id"])), row["no"], f"given up by {row['group']}: {row['reason']}",
            row["name"], row["queue"], row["offset"], groups=[row["group"]], at_us=row["at_us"], log=log.name,
            evidence={"reason": row["reason"]},
        )
        for row in rows
    ]  # fmt: skip
    return Dead(total, reasons, cases)


def _waiting(spark: SparkSession, log: LogInput, letters: DataFrame) -> DataFrame:
    """The letters that are still there, and whose message is in no queue under one of the ids of those sent again."""
    starts = [(topic, queue, start) for (topic, queue), start in log.catalog.trimmed.items()]
    purged = small_table(spark, {"topic": pa.int64(), "queue": pa.int32(), "start": pa.int64()}, starts)
    kept = letters.join(F.broadcast(purged), ["topic", "queue"], "left").where("start IS NULL OR offset >= start")
    again = kept.select(F.explode(F.array("again", "again_before")).alias("id")).distinct()
    sent = log.queued_ids(spark).join(F.broadcast(again), "id").distinct()
    for name in ("again", "again_before"):
        kept = kept.join(F.broadcast(sent.withColumnRenamed("id", name)), name, "left_anti")
    return kept
