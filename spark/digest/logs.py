"""A digest of a log: equal rows of its segments' copies are counted and combined.

Spark groups the rows by slot, queue, sender and what groups did with them; no row is moved for that. A row's form says
how much of a message's life it shows, so that the comparison knows what it may rely on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import NotifyError
from notify.spark.digest.slots import SLOT_BYTES
from notify.spark.inputs.columns import COMMITTED, ROLLED_BACK
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge import message_rows
from notify.spark.judge.deadlines import InTime
from notify.spark.judge.measures import bucket_of
from notify.spark.judge.message_rows import Groups

WHOLE, LATE, OPEN, PENDING, WAITING, ROLLED, ODD = range(7)
"""Forms of rows: in a queue, with its half or sent without a transaction; in a queue, its half not here; a half
without an outcome here; committed, and in no queue here; the same, and not due yet; rolled back, with its half; and
all others."""
FEW = 500_000
"""Up to this many acknowledgements are sent to every task; more are joined by a shuffle."""
MOST_ROWS = 2_000_000
"""The most rows of a digest that this process takes."""
_MASKS = ("acked", "settled", "attempted")


class TooManyParts(NotifyError):
    """The digest has too many parts: reading the messages is quicker."""

    code = "too_many_parts"


class LogDigest:
    """The digest of one log."""

    def __init__(self, spark: SparkSession, log: LogInput, groups: Groups, in_time: InTime) -> None:
        self._spark = spark
        self._log = log
        self._groups = groups
        self._in_time = in_time

    def rows(self, from_us: int, waits_from_us: int) -> Iterator[dict[str, Any]]:
        """Rows of slot, topic, queue, producer_group, source, form, bucket, masks, and sums. Raises TooManyParts.

        `from_us`: of segments written since then. `waits_from_us`: a message that is due then or later may wait.
        """
        stored = self._log.stored(self._spark, self._groups, from_us)
        if stored is None:
            return
        messages = self._with_loose(stored, from_us)
        is_sent = F.col("producer_group") == 0
        parts = [self._grouped(messages.where(~is_sent), _form(waits_from_us))]
        if any(facts.published for facts in self._log.facts):
            parts.append(self._grouped(_one_each(messages.where(is_sent), self._masks()), _form_of_sent(waits_from_us)))
        table = reduce(DataFrame.unionAll, parts).toArrow()
        if table.num_rows > MOST_ROWS:
            raise TooManyParts(f"the digest of log {self._log.name} has {table.num_rows} parts")
        for batch in table.to_batches(max_chunksize=10_000):
            yield from batch.to_pylist()

    def _masks(self) -> list[str]:
        return [f"{mask}{b}" for mask in _MASKS for b in range(self._groups.blocks)]

    def _with_loose(self, messages: DataFrame, from_us: int) -> DataFrame:
        """The messages, with their settlements in all segments."""
        acks = self._log.acks(self._spark, from_us, loose_only=True)
        if acks is None:
            return messages
        bits = F.broadcast(self._groups.table(self._spark))
        named = message_rows.of_acks(acks.join(bits, "consumer_group"), self._groups)
        masks = self._masks()
        more = named.groupBy("id", "no").agg(
            *[F.bit_or(mask).alias(f"more_{mask}") for mask in masks],
            F.min("acked_us").alias("more_acked_us"),
            F.max("last_acked_us").alias("more_last_acked_us"),
        )
        if sum(facts.loose for facts in self._log.facts) <= FEW:
            more = F.broadcast(more)
        joined = messages.join(more, ["id", "no"], "left")

        def of_more(name: str) -> Column:
            return F.when(F.col("offset").isNotNull(), F.col(f"more_{name}"))

        both = {m: message_rows.bits(F.col(m)).bitwiseOR(message_rows.bits(of_more(m))) for m in masks}
        both["acked_us"] = F.least("acked_us", of_more("acked_us"))
        both["last_acked_us"] = F.greatest("last_acked_us", of_more("last_acked_us"))
        return joined.withColumns(both).drop(*[c for c in more.columns if c.startswith("more_")])

    def _grouped(self, messages: DataFrame, form: Column) -> DataFrame:
        masks = {mask: [f"{mask}{b}" for b in range(self._groups.blocks)] for mask in _MASKS}
        is_queued = F.col("offset").isNotNull()
        is_acked = _any_bit(masks["acked"]) | F.col("acked_us").isNotNull()
        took = F.when(F.col("due_us").isNull(), F.col("last_acked_us") - F.col("queued_us"))
        at = F.coalesce("half_us", "queued_us")
        is_first = F.col("no") == 0
        is_due = (F.col("outcome") == COMMITTED) & self._in_time.is_due("half_us")
        kept = [*masks["acked"], *masks["settled"]]
        bucket = F.when(F.col("took").isNotNull(), bucket_of(F.col("took")))
        keyed = messages.withColumn("took", took).withColumns(
            {"slot": F.substring("id", 1, SLOT_BYTES), "form": form, "bucket": bucket}
            | {name: message_rows.bits(F.col(name)) for name in kept}
        )
        return keyed.groupBy("slot", "topic", "queue", "producer_group", "source", "form", "bucket", *kept).agg(
            F.count(F.lit(1)).alias("count"),
            F.bit_xor("id_hash").alias("hash"),
            F.bit_xor("body_hash").alias("body_hash"),
            F.count("body_hash").alias("digests"),
            F.count_if(is_queued).alias("places"),
            F.count_if(is_queued & is_acked).alias("acknowledged"),
            F.count_if(is_queued & _any_bit(masks["attempted"])).alias("again"),
            F.count("half_us").alias("halves"),
            F.count_if(is_due).alias("due"),
            F.count_if(is_due & is_queued & self._in_time.is_prompt()).alias("delivered"),
            F.count_if(is_first).alias("first_count"),
            F.bit_xor(F.when(is_first, F.col("id_hash"))).alias("first_hash"),
            F.min(at).alias("low_us"),
            F.max(at).alias("high_us"),
            F.min("last_acked_us").alias("first_acked_us"),
            F.min("offset").alias("low_offset"),
            F.max("offset").alias("high_offset"),
        )


def _any_bit(masks: list[str]) -> Column:
    return reduce(Column.__or__, [message_rows.bits(F.col(mask)) != 0 for mask in masks])


def _form(waits_from_us: int) -> Column:
    """The form of a transaction's row."""
    half, queued = F.col("half_us").isNotNull(), F.col("offset").isNotNull()
    committed, rolled = F.col("outcome") == COMMITTED, F.col("outcome") == ROLLED_BACK
    return (
        F.when(committed & queued & half, WHOLE)
        .when(committed & queued, LATE)
        .when((F.col("outcome") == 0) & half & ~queued, OPEN)
        .when(committed & (F.col("due_us") >= waits_from_us), WAITING)
        .when(committed & F.col("due_us").isNotNull(), PENDING)
        .when(rolled & half & ~queued, ROLLED)
        .otherwise(ODD)
    )


def _form_of_sent(waits_from_us: int) -> Column:
    """The form of a message that was sent without a transaction, from its one row of `_one_each`."""
    waits = (F.col("places") == 0) & (F.col("due_us") >= waits_from_us)
    return F.when((F.col("places") == 1) & F.col("half_us").isNull(), WHOLE).when(waits, WAITING).otherwise(ODD)


def _one_each(rows: DataFrame, masks: list[str]) -> DataFrame:
    """One row for each message, with the number of its places: nothing else would show that there are two."""
    lowest = ("half_us", "queued_us", "acked_us")
    kept = [c for c in rows.columns if c not in ("id", "no", *masks)]
    return rows.groupBy("id", "no").agg(
        F.count("offset").alias("places"),
        *[(F.min if c in lowest else F.max)(c).alias(c) for c in kept],
        *[F.bit_or(mask).alias(mask) for mask in masks],
    )
