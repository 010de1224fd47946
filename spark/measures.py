"""Figures of an audit: messages by minute, topic and class, and their latencies, each in one query."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from notify.spark import findings
from notify.spark.columns import COMMITTED
from notify.spark.report.histogram import STEPS
from notify.spark.result import LATENCIES

TOTALS = (
    "messages", "committed", "queued", "in_queues", "acknowledged", "effects", "rows", "halves", "closed"
)  # fmt: skip
"""Counts of each bucket, beside the findings."""


def count(rows: DataFrame, bucket_us: int, topics: dict[int, str], blocks: int) -> list[dict[str, Any]]:
    """Messages by bucket of time (`at_us`, of `bucket_us` each) and topic: TOTALS, each class, `newest_row_us`, and
    masks `done0`, … of the groups that acknowledged closed messages.

    `blocks`: of the groups' masks.
    """
    names = [f.name for f in findings.FINDINGS if f.when is not None]
    committed = F.col("t_state").bitwiseAND(3) == COMMITTED
    queued = F.col("place").isNotNull()
    # Kafka says who acknowledged a message, and not when.
    is_acked = [F.col(name) != 0 for name in rows.columns if name.removeprefix("acked").isdigit()]
    acked = reduce(Column.__or__, is_acked, F.col("acked_us").isNotNull())
    counted = rows.groupBy((F.col("event_us") / bucket_us).cast("bigint").alias("bucket"), "topic").agg(
        F.count("id").alias("messages"),
        F.count_if(committed).alias("committed"),
        F.count_if(committed & queued).alias("queued"),
        F.count_if(queued).alias("in_queues"),
        F.count_if(queued & acked).alias("acknowledged"),
        F.count_if(F.col("effect_us").isNotNull()).alias("effects"),
        F.count_if(F.col("t_state").isNotNull()).alias("rows"),
        F.count_if(F.col("half_us").isNotNull()).alias("halves"),
        F.count_if(F.col("is_closed")).alias("closed"),
        F.max(F.when(F.col("t_us").isNotNull(), F.col("event_us"))).alias("newest_row_us"),
        *[F.bit_or(F.when(F.col("is_closed"), F.col(f"acked{b}"))).alias(f"done{b}") for b in range(blocks)],
        *[F.count_if(findings.has(n)).alias(n) for n in names],
    )
    buckets = [row.asDict() for row in counted.collect()]
    for bucket in buckets:
        bucket["topic"] = topics.get(bucket["topic"], "")
        bucket["at_us"] = bucket.pop("bucket") * bucket_us
    return sorted(buckets, key=lambda bucket: (bucket["at_us"], bucket["topic"]))


def latencies(rows: DataFrame, bucket_us: int, topics: dict[int, str]) -> dict[str, list[tuple[int, str, int, int]]]:
    """Rows of (bucket, topic, bin, messages) by kind. A message counts for each kind whose two times it has."""
    between = {
        "commit_to_queue": ("t_us", "queued_us"),
        "queue_to_ack": ("queued_us", "last_acked_us"),
        "queue_to_effect": ("queued_us", "effect_us"),
    }
    pairs = [x for kind, (start, end) in between.items() for x in (F.lit(kind), F.col(end) - F.col(start))]
    took = F.stack(F.lit(len(between)), *pairs)
    counted = (
        rows.where(F.col("due_us").isNull())
        .select((F.col("event_us") / bucket_us).cast("bigint").alias("bucket"), "topic", took.alias("kind", "us"))
        .where("us IS NOT NULL")
        .groupBy(
            "bucket",
            "topic",
            "kind",
            F.floor(F.log2(F.greatest("us", F.lit(1)).cast("double")) * STEPS).cast("int").alias("bin"),
        )
        .count()
    )
    histograms: dict[str, list[tuple[int, str, int, int]]] = {kind: [] for kind in LATENCIES}
    for row in counted.collect():
        topic = topics.get(row["topic"], "")
        histograms[row["kind"]].append((row["bucket"] * bucket_us, topic, row["bin"], row["count"]))
    return {kind: sorted(several) for kind, several in histograms.items()}
