"""Apache Kafka as an audit's input: its topics, their records, and the consumer groups' offsets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import InvalidRequest, Unavailable
from notify.kafka.records import brokers_of
from notify.spark import life
from notify.spark.kafka_source import NotifyKafkaSource, Part, parts_of, read_part
from notify.spark.life import Groups
from notify.spark.small_table import small_table

OWN_GROUPS = ("notify-audit", "notify-delays", "notify-delays-earlier", "notify-delay-wheels", "notify-positions")
_NOT_FIRST = ("retry.", "dead-letter.", "notify-", "__")
CALL_SECONDS = 30.0


class KafkaInput:
    """The topics of one Kafka cluster. Call `prepare` first."""

    def __init__(self, url: str, topics: Sequence[str] = ()) -> None:
        """`topics`: the topics to audit; by default all except those of Kafka itself and of the bridge."""
        self.brokers = brokers_of(url)
        self.topics = list(topics)
        self._parts: list[Part] = []
        self._committed: dict[str, dict[tuple[int, int], int]] = {}
        self.watermark_us = 0
        self.first_us = 0

    def prepare(self) -> None:
        """List topics and offsets. Raises Unavailable if no broker answers, InvalidRequest for a missing topic."""
        admin = AdminClient({"bootstrap.servers": self.brokers, "log_level": 2})
        self.watermark_us = time.time_ns() // 1000
        try:
            present = set(admin.list_topics(timeout=CALL_SECONDS).topics)
            missing = set(self.topics) - present
            if missing:
                raise InvalidRequest(f"--kafka: there is no topic {', '.join(sorted(missing))}")
            if not self.topics:
                self.topics = sorted(t for t in present if not t.startswith(_NOT_FIRST))
            if not self.topics:
                raise InvalidRequest(f"--kafka {self.brokers}: the cluster has no topic with messages")
            numbers = {name: n for n, name in enumerate(self.topics)}
            names = [g.group_id for g in admin.list_consumer_groups().result(CALL_SECONDS).valid]
            for name in sorted(set(names) - set(OWN_GROUPS)):
                request = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name)])
                partitions = request[name].result(CALL_SECONDS).topic_partitions or []
                self._committed[name] = {
                    (numbers[p.topic], p.partition): p.offset
                    for p in partitions
                    if p.topic in numbers and p.offset >= 0
                }
        except KafkaException as error:
            raise Unavailable(f"Kafka at {self.brokers}: {error.args[0].str()}") from error
        self._committed = {name: offsets for name, offsets in self._committed.items() if offsets}
        self._parts = parts_of(self.brokers, self.topics)

    def groups(self) -> Sequence[str]:
        return sorted(self._committed)

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        """For each (topic, partition) the groups that read it, each with its committed offset."""
        readers: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for group, offsets in self._committed.items():
            for place, offset in offsets.items():
                readers.setdefault(place, []).append((group, offset))
        return readers

    def records_of(self, transaction: bytes) -> list[dict[str, Any]]:
        """(no, queued_us, place) of a transaction's records. Reads every topic to its end."""
        records = []
        for part in self._parts:
            for batch in read_part(self.brokers, part):
                for row in batch.filter(pc.equal(batch["id"], transaction)).to_pylist():
                    place = f"{part.topic}/{part.partition}@{row['offset']}"
                    records.append({"no": row["no"], "queued_us": row["queued_us"], "place": place})
        return records

    def messages(self, spark: SparkSession, groups: Groups, number: int) -> DataFrame:
        """Table Q, in the common shape of spark.life."""
        spark.dataSource.register(NotifyKafkaSource)
        rows = (
            spark.read.format("notify_kafka")
            .option("brokers", self.brokers)
            .option("topics", ",".join(self.topics))
            .load()
        )
        topics = small_table(spark, {"topic": pa.int64(), "name": pa.string()}, enumerate(self.topics)).select(
            "topic", F.xxhash64("name").alias("topic_hash")
        )
        named = rows.join(F.broadcast(topics), "topic")
        named = named.withColumn(
            "group_hash", F.when(F.col("producer_group").isNotNull(), F.xxhash64("producer_group"))
        )
        nothing = F.lit(None).cast("bigint")
        for missing in ("half_us", "due_us", "acked_us", "last_acked_us"):
            named = named.withColumn(missing, nothing)
        named = named.withColumn("outcome", F.lit(1))
        return life.of_messages(named, groups, number)
