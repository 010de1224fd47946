"""How finely figures are counted over time and topics: their number is bounded, because they come to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

MOST_BUCKETS = 20_000
"""The most pairs of time and topic that are counted apart: figures of all of them come to the driver."""
MOST_TOPICS = 200
"""The most topics that are counted apart where there are more than MOST_BUCKETS."""
OTHERS = "(other topics)"
_OTHERS = 0


@dataclass(frozen=True)
class Grain:
    """How finely messages are counted."""

    bucket_us: int
    topics: Mapping[int, str]
    """Names by their hashes, which rows hold; of all topics if `is_whole`, otherwise of the largest."""
    is_whole: bool = True

    def keys(self) -> list[Column]:
        """The columns `bucket` and `topic` that messages are grouped by."""
        topic = F.col("topic")
        if not self.is_whole:
            topic = F.when(topic.isin(sorted(self.topics)) | topic.isNull(), topic).otherwise(_OTHERS)
        return [(F.col("event_us") / self.bucket_us).cast("bigint").alias("bucket"), topic.alias("topic")]

    def name(self, topic: int | None) -> str:
        """The name that stands for a value of the column `topic`."""
        if topic is None:
            return ""
        return self.topics.get(topic, OTHERS if not self.is_whole else "")


def grain_of(rows: DataFrame, bucket_us: int, topics: Mapping[int, str]) -> Grain:
    """Buckets of `bucket_us` and every topic; where these are too many, wider buckets and the largest topics."""
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
    named = {row["topic"]: topics.get(row["topic"], "") for row in largest if row["topic"] is not None}
    return Grain(bucket_us * -(-points // most_points), named, is_whole=False)
