"""Judges messages again by facts that became known only after their rows were read.

Such facts are purges and retention during the audit, and logs and storages that were not given. A message that lacks
something for one of these reasons is not a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.spark.inputs import missing_logs
from notify.spark.judge.coverage import Coverage
from notify.spark.judge.findings import bit_of, has
from notify.spark.judge.message_rows import DATABASE
from notify.spark.judge.message_times import MADE_US
from notify.spark.judge.terms import SKEW_US
from notify.spark.result import Inputs, Plan, Result
from notify.spark.times import instant_text

MOST_NAMED = 5
"""The most partitions that a reason names."""


@dataclass(frozen=True)
class Afterwards:
    """The facts that became known. Instants are in microseconds since 1970; 0: nothing new is known."""

    rows_from_us: int = 0
    """Local rows before this were purged while they were read."""
    inbox_from_us: int = 0
    queues_from_us: int = 0
    """Records of topics before this were deleted while they were read."""
    slack_us: int = SKEW_US
    """The longest time between the instants of a message."""
    away: DataFrame | None = None
    """(id): committed transactions of shards whose log or storage was not given."""
    elsewhere: frozenset[int] = frozenset()
    """The numbers of databases whose messages took effect although no given log ever had them."""
    lacks_storage: bool = False
    """Whether halves may be in a storage that was not given."""

    @property
    def is_new(self) -> bool:
        """Whether anything became known."""
        moved = self.rows_from_us or self.inbox_from_us or self.queues_from_us
        return bool(moved or self.lacks_storage or self.elsewhere) or self.away is not None

    def judged(self, rows: DataFrame) -> DataFrame:
        """Rows of spark.rows.MessageRows without the classes that a missing input may explain."""
        if self.away is not None:
            lost = rows.where(has("LOST"))
            away = lost.join(self.away, "id", "left_semi")
            parts = [rows.where(~has("LOST")), lost.join(self.away, "id", "left_anti"), _pending(away, "LOST")]
            rows = reduce(DataFrame.unionAll, parts)
        if self.elsewhere:
            number = F.shiftright("t_state", DATABASE.bit_length() - 1)
            rows = _pending(rows, "LOST", F.coalesce(number.isin(*self.elsewhere), F.lit(False)))
        if self.away is not None or self.lacks_storage or self.elsewhere:
            rows = _pending(rows, "ORPHAN_ROW", F.col("place").isNull())
        if self.queues_from_us:
            until_us = self.queues_from_us + self.slack_us
            rows = _pending(rows, "LOST", F.col("event_us") < until_us)
            rows = _pending(rows, "ORPHAN_ROW", F.col("place").isNull() & (F.expr(MADE_US) < until_us))
        if self.rows_from_us:
            is_young = F.expr(MADE_US) < self.rows_from_us + SKEW_US
            rows = _without(rows, "GHOST", F.col("t_state").isNull() & is_young)
        if self.inbox_from_us:
            acked_us = F.coalesce("acked_us", "queued_us")
            rows = _without(rows, "ACKED_NO_EFFECT", acked_us < self.inbox_from_us)
        return rows


def look_again(
    spark: SparkSession, plan: Plan, inputs: Inputs, coverage: Coverage, result: Result, lost: DataFrame | None
) -> Afterwards:
    """Ask the inputs again after their rows were read, and note new facts in the result.

    `lost`: the rows, if a message among them seems to be lost; None: no missing log needs to be looked for.
    """
    rows_us, inbox_us = _purged(plan, inputs, coverage, result)
    away, elsewhere = None, frozenset[int]()
    terms = coverage.terms
    judged = missing_logs.judged_span(terms.log_from_us, terms.closed_before_us, terms.slack_us)
    if lost is not None and (absent := missing_logs.absent_shards(inputs, coverage.span, judged)):
        missing_logs.note(result, inputs, absent)
        away = missing_logs.transactions_of(spark, inputs, coverage.span, absent)
    elif lost is not None:
        delivered = missing_logs.delivered_elsewhere(spark, inputs, lost, terms, coverage.read_from_us)
        missing_logs.note_elsewhere(result, inputs, delivered)
        elsewhere = frozenset(delivered)
    deleted_us = _deleted(inputs, result)
    return Afterwards(rows_us, inbox_us, deleted_us, terms.slack_us, away, elsewhere, coverage.lacks_storage)


def _purged(plan: Plan, inputs: Inputs, coverage: Coverage, result: Result) -> tuple[int, int]:
    """Up to which instant local rows, and inbox rows, were purged since the audit began; 0: nothing was purged."""
    marks = [database.purged() for database in inputs.databases]
    before = (coverage.terms.rows_from_us, coverage.terms.inbox_from_us)
    moved = [0, 0]
    for number, rows in enumerate(("local rows", "inbox rows")):
        newest_us = max(mark[number] for mark in marks)
        if newest_us <= before[number]:
            continue
        moved[number] = newest_us
        text = f"{rows} from before {instant_text(newest_us)} were purged while the audit read them"
        if plan.from_us and plan.from_us < newest_us:
            result.reasons.append(f"{text}: missing rows of that time cannot be judged")
        else:
            result.notes.append(f"{text}: a missing row of that time is not a finding")
    return moved[0], moved[1]


def _deleted(inputs: Inputs, result: Result) -> int:
    """From which instant on Kafka's topics are complete; 0: no record was deleted since the audit began."""
    from_us = 0
    for kafka in inputs.kafka:
        texts, whole_us = kafka.look_again()
        from_us = max(from_us, whole_us)
        if texts:
            more = f" and of {len(texts) - MOST_NAMED} more partitions" if len(texts) > MOST_NAMED else ""
            result.reasons.append(
                f"{kafka.name}: records were deleted while they were read, as by retention "
                f"({', '.join(texts[:MOST_NAMED])}{more}): the messages in them cannot be judged"
            )
    return from_us


def _without(rows: DataFrame, name: str, when: Column) -> DataFrame:
    """The rows; those that meet the condition no longer have the class `name`."""
    others = F.col("classes").bitwiseAND(~bit_of(name))
    return rows.withColumn("classes", F.when(F.coalesce(when, F.lit(False)), others).otherwise(F.col("classes")))


def _pending(rows: DataFrame, name: str, when: Column | None = None) -> DataFrame:
    """The rows; those that meet the condition have PENDING in place of the class `name`."""
    changed = has(name) if when is None else has(name) & when
    pending = F.col("classes").bitwiseAND(~bit_of(name)).bitwiseOR(bit_of("PENDING"))
    return rows.withColumn("classes", F.when(changed, pending).otherwise(F.col("classes")))
