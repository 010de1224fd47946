"""The figures of an audit: messages by time, topic and class in one query, and their latencies in two others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from itertools import chain
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.protocol.latency import BOUNDS_US, BUCKETS
from notify.spark.inputs.columns import COMMITTED, name_hash
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge import findings
from notify.spark.judge.deadlines import COUNTED, InTime
from notify.spark.judge.grain import Grain
from notify.spark.judge.message_rows import Groups
from notify.spark.result import LATENCIES
from notify.storage.groups import SettleKind

TOTALS = (
    "messages", "committed", "queued", "in_queues", "acknowledged", "effects", "rows", "halves", "closed", *COUNTED
)  # fmt: skip
"""The counts of each bucket apart from the findings."""


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
    """Rows of Result.latencies, with the messages of several sources added up."""
    counts: Counter[tuple[int, str, int]] = Counter()
    for bucket, topic, number, count in chain(*several):
        counts[bucket, topic, number] += count
    return sorted((*key, count) for key, count in counts.items())


def bucket_of(us: Column) -> Column:
    """The number of the bucket of notify/protocol/latency.py that counts a duration in microseconds, which is not
    null."""
    number = F.when(us <= BOUNDS_US[0], 0)
    for place, bound in enumerate(BOUNDS_US[1:], 1):
        number = number.when(us <= bound, place)
    return number.otherwise(len(BOUNDS_US))


def commit_to_ack(spark: SparkSession, log: LogInput, from_us: int, to_us: int) -> dict[str, list[int]]:
    """By consumer group, the acknowledgements of messages that were queued in [from_us, to_us), by bucket.

    They are counted as a server counts `commit_to_ack`: from a message's commit, or from its release if it was delayed,
    until each acknowledgement; those of the instances of a broadcast together.
    """
    acks = log.acks(spark, from_us)
    if acks is None:
        return {}
    groups = {name_hash(name): name.partition("@")[0] for name in log.groups()}
    is_acked = (F.col("kind") == SettleKind.ACK.value) & F.col("queued_us").between(from_us, to_us - 1)
    counted = acks.where(is_acked).groupBy(
        "consumer_group", bucket_of(F.col("at_us") - F.col("queued_us")).alias("bucket")
    )
    counts: dict[str, list[int]] = {}
    for row in counted.count().collect():
        group = counts.setdefault(groups[row["consumer_group"]], [0] * BUCKETS)
        group[row["bucket"]] += row["count"]
    return counts


def latencies(rows: DataFrame, grain: Grain) -> dict[str, list[tuple[int, str, int, int]]]:
    """Rows of Result.latencies. A message counts for a kind if it has both times."""
    between = {
        "row_to_queue": ("t_us", "queued_us"),
        "queue_to_ack": ("queued_us", "last_acked_us"),
        "queue_to_effect": ("queued_us", "effect_us"),
    }
    pairs = [part for kind, (start, end) in between.items() for part in (F.lit(kind), F.col(end) - F.col(start))]
    took = F.stack(F.lit(len(between)), *pairs)
    counted = (
        rows.where(F.col("due_us").isNull())
        .select(*grain.keys(), took.alias("kind", "us"))
        .where("us IS NOT NULL")
        .groupBy("bucket", "topic", "kind", bucket_of(F.col("us")).alias("took"))
        .count()
    )
    histograms: dict[str, list[tuple[int, str, int, int]]] = {kind: [] for kind in LATENCIES}
    for row in counted.collect():
        at_us = row["bucket"] * grain.bucket_us
        histograms[row["kind"]].append((at_us, grain.name(row["topic"]), row["took"], row["count"]))
    return {kind: sorted(histogram) for kind, histogram in histograms.items()}
