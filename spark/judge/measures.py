"""The figures of an audit: messages by time, topic and class in one query, and their latencies in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from itertools import chain
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from notify.spark.inputs.columns import COMMITTED
from notify.spark.judge import findings
from notify.spark.judge.deadlines import COUNTED, InTime
from notify.spark.judge.grain import Grain
from notify.spark.judge.message_rows import Groups
from notify.spark.report.histogram import STEPS
from notify.spark.result import LATENCIES

TOTALS = (
    "messages", "committed", "queued", "in_queues", "acknowledged", "effects", "rows", "halves", "closed", *COUNTED
)  # fmt: skip
"""The counts of each bucket besides the findings."""


def count(rows: DataFrame, grain: Grain, groups: Groups, in_time: InTime) -> list[dict[str, Any]]:
    """A dictionary for each bucket of time (`at_us`) and topic: TOTALS, the count of each class, `newest_row_us`, and
    the masks `done0`, … of the groups that acknowledged closed messages."""
    names = [finding.name for finding in findings.FINDINGS if finding.when is not None]
    committed = F.col("t_state").bitwiseAND(3) == COMMITTED
    queued = F.col("place").isNotNull()
    # Kafka tells who acknowledged a message, but not when.
    is_acked = [F.col(name) != 0 for name in rows.columns if name.removeprefix("acked").isdigit()]
    acked = reduce(Column.__or__, is_acked, F.col("acked_us").isNotNull())
    counted = rows.groupBy(*grain.keys()).agg(
        F.count("id").alias("messages"),
        F.count_if(committed).alias("committed"),
        F.count_if(committed & queued).alias("queued"),
        F.count_if(queued).alias("in_queues"),
        F.count_if(queued & acked).alias("acknowledged"),
        F.count_if(F.col("effect_us").isNotNull()).alias("effects"),
        F.count_if(F.col("t_state").isNotNull()).alias("rows"),
        F.count_if(F.col("half_us").isNotNull()).alias("halves"),
        F.count_if(F.col("is_closed")).alias("closed"),
        *[column.alias(name) for name, column in in_time.counts(groups).items()],
        F.max(F.when(F.col("t_us").isNotNull(), F.col("event_us"))).alias("newest_row_us"),
        *[F.bit_or(F.when(F.col("is_closed"), F.col(f"acked{b}"))).alias(f"done{b}") for b in range(groups.blocks)],
        *[F.count_if(findings.has(name)).alias(name) for name in names],
    )
    buckets = [row.asDict() for row in counted.collect()]
    for bucket in buckets:
        bucket["topic"] = grain.name(bucket["topic"])
        bucket["at_us"] = bucket.pop("bucket") * grain.bucket_us
    return sorted(buckets, key=lambda bucket: (bucket["at_us"], bucket["topic"]))


def together(*several: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The buckets of several sources, in which the figures of the same time and topic are added up."""
    buckets: dict[tuple[int, str], dict[str, Any]] = {}
    for bucket in chain(*several):
        key = (bucket["at_us"], bucket["topic"])
        total = buckets.setdefault(key, dict.fromkeys(TOTALS, 0) | {"newest_row_us": 0})
        newest_us = max(total["newest_row_us"], bucket["newest_row_us"] or 0)
        for name, value in bucket.items():
            total[name] = total.get(name, 0) + value if isinstance(value, int) else value
        total |= {"at_us": bucket["at_us"], "topic": bucket["topic"], "newest_row_us": newest_us}
    return [buckets[key] for key in sorted(buckets)]


def added(*several: Iterable[tuple[int, str, int, int]]) -> list[tuple[int, str, int, int]]:
    """Rows of (bucket, topic, bin, messages), with the messages of several sources added up."""
    counts: Counter[tuple[int, str, int]] = Counter()
    for bucket, topic, number, count in chain(*several):
        counts[bucket, topic, number] += count
    return sorted((*key, count) for key, count in counts.items())


def latencies(rows: DataFrame, grain: Grain) -> dict[str, list[tuple[int, str, int, int]]]:
    """By kind of latency: rows of (bucket, topic, bin, messages). A message counts for a kind if it has both times."""
    between = {
        "commit_to_queue": ("t_us", "queued_us"),
        "queue_to_ack": ("queued_us", "last_acked_us"),
        "queue_to_effect": ("queued_us", "effect_us"),
    }
    pairs = [part for kind, (start, end) in between.items() for part in (F.lit(kind), F.col(end) - F.col(start))]
    took = F.stack(F.lit(len(between)), *pairs)
    counted = (
        rows.where(F.col("due_us").isNull())
        .select(*grain.keys(), took.alias("kind", "us"))
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
        at_us = row["bucket"] * grain.bucket_us
        histograms[row["kind"]].append((at_us, grain.name(row["topic"]), row["bin"], row["count"]))
    return {kind: sorted(histogram) for kind, histogram in histograms.items()}
