"""How finely figures are counted by time and topic: Spark's driver collects them, so their number is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

MOST_BUCKETS = 20_000
"""The most pairs of time and topic that have figures of their own: the driver collects all of them."""
MOST_TOPICS = 200
"""The most topics that have figures of their own if there would be more than MOST_BUCKETS."""
OTHERS = "(other topics)"
_OTHERS = 0


@dataclass(frozen=True)
class Grain:
    """How finely messages are counted."""

    bucket_us: int
    topics: Mapping[int, str]
    """Names of topics by the hashes in rows: all topics if `is_whole`, otherwise the largest."""
    is_whole: bool = True

    def keys(self) -> list[Column]:
        """The columns `bucket` and `topic` that messages are grouped by."""
        topic = F.col("topic")
        if not self.is_whole:
            topic = F.when(topic.isin(sorted(self.topics)) | topic.isNull(), topic).otherwise(_OTHERS)
        return [(F.col("event_us") / self.bucket_us).cast("bigint").alias("bucket"), topic.alias("topic")]

    def name(self, topic: int | None) -> str:
        """The name of the topic whose hash is in the column `topic`."""
        if topic is None:
            return ""
        return self.topics.get(topic, OTHERS if not self.is_whole else "")


def grain_of(rows: DataFrame, bucket_us: int, topics: Mapping[int, str]) -> Grain:
    """Buckets of `bucket_us` and every topic; if these are too many, wider buckets and the largest topics."""
    by_topic = rows.groupBy("topic").agg(
        F.count("id").alias("messages"), F.min("event_us").alias("first_us"), F.max("event_us").alias("last_us")
    )
    counted = by_topic.collect()
    if not counted:
        return Grain(bucket_us, topics)
    points = (max(row["last_us"] for row in counted) - min(row["first_us"] for row in counted)) // bucket_us + 1
    if points * len(counted) <= MOST_BUCKETS:
        return Grain(bucket_us, topics)
    largest = sorted(counted, key=lambda row: -row["messages"])[:MOST_TOPICS]
    most_points = MOST_BUCKETS // (len(largest) + 1)
    names = {row["topic"]: topics.get(row["topic"], "") for row in largest if row["topic"] is not None}
    return Grain(bucket_us * -(-points // most_points), names, is_whole=False)
