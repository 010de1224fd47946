"""Figures over time are exact sums, and their number is bounded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from notify.protocol.latency import BOUNDS_US, BUCKETS, Histogram
from notify.spark.judge import grain, measures
from notify.spark.judge.deadlines import InTime
from notify.spark.judge.grain import OTHERS, Grain, grain_of
from notify.spark.judge.message_rows import Groups
from notify.spark.result import LATENCIES

MINUTE_US = 60_000_000
TOPICS = {n: f"topic-{n}" for n in range(1, 41)}
COLUMNS = (
    "t_us", "t_state", "half_us", "due_us", "queued_us", "place", "acked_us", "last_acked_us", "effect_us", "acked0",
    "expected0", "settled0", "effects0", "before_inbox0",
)  # fmt: skip


def messages(spark: Any) -> Any:
    """Topic n has n messages in each of 30 minutes; and one message is in no log."""
    rows = [(minute * MINUTE_US, topic) for minute in range(30) for topic in TOPICS for _ in range(topic)]
    rows.append((5, None))
    table = {"event_us": [at for at, _ in rows], "topic": pa.array([topic for _, topic in rows], pa.int64())}
    table |= {name: pa.array([1 if topic else None for _, topic in rows], pa.int64()) for name in COLUMNS}
    table["last_acked_us"] = pa.array([9 if topic else None for _, topic in rows], pa.int64())
    table |= {name: pa.nulls(len(rows), pa.int64()) for name in ("due_us", "left0")}
    table |= {"id": [b"i"] * len(rows), "is_closed": [True] * len(rows), "classes": [0] * len(rows)}
    return spark.createDataFrame(pa.table(table))


@pytest.mark.long
def test_there_are_as_many_buckets_as_fit(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = messages(spark)
    by = (Groups(["g"]), InTime(MINUTE_US, MINUTE_US, 0, 0, frozenset({"g"}), frozenset()))
    whole = grain_of(rows, MINUTE_US, TOPICS)
    assert whole == Grain(MINUTE_US, TOPICS)
    every = measures.count(rows, whole, *by)
    assert len(every) == 30 * len(TOPICS) + 1
    monkeypatch.setattr(grain, "MOST_BUCKETS", 100)
    monkeypatch.setattr(grain, "MOST_TOPICS", 9)
    folded = grain_of(rows, MINUTE_US, TOPICS)
    assert folded == Grain(3 * MINUTE_US, {n: f"topic-{n}" for n in range(32, 41)}, is_whole=False)
    few = measures.count(rows, folded, *by)
    assert len(few) == 10 * 10 + 1  # nine topics, the others together, and what is in no log
    for name in measures.TOTALS:
        assert sum(bucket[name] for bucket in few) == sum(bucket[name] for bucket in every), name
    others = sum(n for n in TOPICS if n < 32)
    assert {b["messages"] for b in few if b["topic"] == OTHERS} == {3 * others}
    measured = measures.latencies(rows, folded)
    assert measured.keys() == set(LATENCIES)
    took = measured["queue_to_ack"]
    assert len(took) == 10 * 10 and {bucket for _, _, bucket, _ in took} == {0}
    assert sum(count for *_, count in took) == 30 * sum(TOPICS)


def test_durations_are_counted_in_the_buckets_of_servers(spark: Any) -> None:
    durations = [-5, 0, 1, *(bound + step for bound in BOUNDS_US for step in (-1, 0, 1))]
    histogram = Histogram()
    for us in durations:
        histogram.add(us)
    rows = spark.createDataFrame(pa.table({"us": pa.array(durations, pa.int64())}))
    counted = rows.groupBy(measures.bucket_of(rows["us"]).alias("bucket")).count().collect()
    counts = {row["bucket"]: row["count"] for row in counted}
    assert [counts.get(bucket, 0) for bucket in range(BUCKETS)] == list(histogram.counts)
