"""Dead letters that nobody has sent again: messages that a group gave up, counted by group and reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify import ids
from notify.spark.kafka_input import KafkaInput
from notify.spark.log_input import LogInput
from notify.spark.result import Found
from notify.spark.small_table import small_table

MOST_SHOWN = 1000
"""The most dead letters that become cases; all are counted."""
MOST_REASONS = 100
"""The most pairs of group and reason that have a count of their own."""


@dataclass
class Dead:
    """The dead letters of one input."""

    count: int = 0
    by_reason: list[dict[str, Any]] = field(default_factory=list)
    """Rows of group, reason and count, the most frequent first."""
    cases: list[Found] = field(default_factory=list)


def of_log(spark: SparkSession, log: LogInput, from_us: int, to_us: int) -> Dead:
    """The dead letters of a log from [from_us, to_us), in microseconds, that were neither sent again nor purged."""
    letters = log.letters(spark)
    if letters is None:
        return Dead()
    waiting = _waiting(spark, log, letters.where(_is_within(from_us, to_us)))
    return _dead(waiting.withColumn("letter", F.lit("")), log.name)


def of_kafka(spark: SparkSession, kafka: KafkaInput, from_us: int, to_us: int) -> Dead:
    """The same as `of_log` for the topics `dead-letter.{group}` of Kafka."""
    waiting = kafka.letters(spark).withColumnsRenamed({"queued_us": "at_us", "target": "name"})
    return _dead(waiting.where(_is_within(from_us, to_us)), kafka.name)


def _is_within(from_us: int, to_us: int) -> Column:
    return (F.col("at_us") >= from_us) & (F.col("at_us") < to_us)


def _dead(waiting: DataFrame, source: str) -> Dead:
    """The counts and cases of these letters. `source`: the input's name."""
    waiting.persist()
    try:
        counted = waiting.groupBy("group", "reason").count().orderBy(F.desc("count"), "group", "reason")
        reasons = [row.asDict() for row in counted.limit(MOST_REASONS).collect()]
        total = sum(row["count"] for row in reasons) if len(reasons) < MOST_REASONS else waiting.count()
        rows = waiting.orderBy("at_us", "id", "no").limit(MOST_SHOWN).collect()
    finally:
        waiting.unpersist()
    return Dead(total, reasons, [_case(row, source) for row in rows])


def _case(row: Any, source: str) -> Found:
    given_up = f"given up by {row['group']}: {row['reason']}"
    is_message = row["id"] is not None
    return Found(
        "DEAD",
        ids.to_text(bytes(row["id"])) if is_message else "",
        row["no"] if is_message else 0,
        given_up if is_message else f"{row['letter']}, a record without a message's id, {given_up}",
        row["name"] or "",
        row["queue"],
        row["offset"],
        groups=[row["group"]],
        at_us=row["at_us"],
        log=source,
        evidence={"reason": row["reason"]},
    )


def _waiting(spark: SparkSession, log: LogInput, letters: DataFrame) -> DataFrame:
    """The letters that were not purged, and that no queue has under one of the ids of letters sent again."""
    starts = [(topic, queue, start) for (topic, queue), start in log.catalog.trimmed.items()]
    purged = small_table(spark, {"topic": pa.int64(), "queue": pa.int32(), "start": pa.int64()}, starts)
    waiting = letters.join(F.broadcast(purged), ["topic", "queue"], "left").where("start IS NULL OR offset >= start")
    again = waiting.select(F.explode(F.array("again", "again_before")).alias("id")).distinct()
    queued = log.queued_ids(spark)
    if queued is None:
        return waiting
    sent = queued.join(F.broadcast(again), "id").distinct()
    for name in ("again", "again_before"):
        waiting = waiting.join(F.broadcast(sent.withColumnRenamed("id", name)), name, "left_anti")
    return waiting
