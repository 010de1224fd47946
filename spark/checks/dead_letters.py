"""Dead letters that nobody has sent again: messages that a group gave up, counted by group and reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.protocol import ids
from notify.spark.checks import left_out
from notify.spark.inputs.changes import END
from notify.spark.inputs.effects import BusinessEffects
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.current_state import NONE, effects_of
from notify.spark.result import Found, Inputs, Result
from notify.spark.small_table import small_table
from notify.storage.names import is_dropped_topic

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
    left_out: list[Found] = field(default_factory=list)
    """Letters that were dropped or purged, as cases of LEFT_OUT."""
    left_out_count: int = 0


def of_log(spark: SparkSession, log: LogInput, from_us: int, to_us: int) -> Dead:
    """The dead letters of a log from [from_us, to_us), in microseconds, that were not sent again."""
    letters = log.letters(spark)
    if letters is None:
        return Dead()
    unsent = _unsent(spark, log, letters.where(_is_within(from_us, to_us))).persist()
    try:
        is_gone = F.col("noted_us").isNotNull() | F.coalesce(F.col("offset") < F.col("start"), F.lit(False))
        dead = _dead(unsent.where(~is_gone).withColumn("letter", F.lit("")), log.name)
        dead.left_out, dead.left_out_count = left_out.letters(log, unsent.where(is_gone))
    finally:
        unsent.unpersist()
    return dead


def of_kafka(spark: SparkSession, kafka: KafkaInput, from_us: int, to_us: int) -> Dead:
    """The same as `of_log` for the topics `dead-letter.{group}` of Kafka."""
    waiting = kafka.letters(spark).withColumnsRenamed({"queued_us": "at_us", "target": "name"})
    return _dead(waiting.where(_is_within(from_us, to_us)), kafka.name)


def tell(inputs: Inputs, result: Result, effects: Sequence[BusinessEffects]) -> None:
    """Say in each case of DEAD whether its message took effect nevertheless, as the group's inbox or one of `effects`
    shows: sent again, it might do so a second time."""
    cases = [case for case in result.found if case.finding == "DEAD" and case.message_id]
    happened = effects_of(inputs.databases, [case.message_id for case in cases], effects)
    for case in cases:
        known, (group,) = happened.get(case.message_id, NONE), case.groups
        if group in known.groups:
            shown = f"the inbox of {group}" if group in known.inboxes else "--effects"
            case.detail += f"; it took effect anyway, as {shown} shows: drop the dead letter, do not redrive it"


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


def _unsent(spark: SparkSession, log: LogInput, letters: DataFrame) -> DataFrame:
    """The letters that no queue has under the id of a letter sent again.

    `start`: the first letter of the topic that was not purged; null: it never was. `noted_us`: when the letter was
    dropped, which leaves a note under that id; null: it was not.
    """
    trimmed = log.catalog.trimmed | dict.fromkeys(((number, 0) for number in log.deleted), END)
    starts = [(topic, queue, start) for (topic, queue), start in trimmed.items()]
    purged = small_table(spark, {"topic": pa.int64(), "queue": pa.int32(), "start": pa.int64()}, starts)
    unsent = letters.join(F.broadcast(purged), ["topic", "queue"], "left")
    queued = log.queued(spark)
    if queued is None:
        return unsent.withColumn("noted_us", F.lit(None).cast("bigint"))
    again = unsent.select(F.col("again").alias("id")).distinct()
    noting = [number for number, name in log.catalog.topics.items() if is_dropped_topic(name)]
    is_note = F.col("topic").isin(noting)
    marks = (
        queued.join(F.broadcast(again), "id")
        .groupBy(F.col("id").alias("again"))
        .agg(F.bool_or(~is_note).alias("is_sent"), F.min(F.when(is_note, F.col("queued_us"))).alias("noted_us"))
    )
    return unsent.join(F.broadcast(marks), "again", "left").where(~F.coalesce("is_sent", F.lit(False)))
