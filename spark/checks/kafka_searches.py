"""Findings over Kafka that the row of one message cannot show: damaged batches, and the order of a key's effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from notify.protocol import ids
from notify.spark.checks import searches
from notify.spark.inputs.databases import Database
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.ranges import Span
from notify.spark.result import Found
from notify.spark.small_table import small_table


def corrupt(spark: SparkSession, kafka: KafkaInput) -> Iterable[Found]:
    for row in kafka.damaged(spark):
        yield Found(
            "CORRUPT", detail=row["damage"], topic=row["name"], queue=row["queue"], offset=row["offset"],
            at_us=row["queued_us"] or 0, log=kafka.name,
        )  # fmt: skip


def disorder(
    spark: SparkSession, kafka: KafkaInput, databases: Sequence[Database], span: Span | None
) -> tuple[list[Found], int]:
    """Messages that took effect in an ordered group after a later message of their key, and the number of all.

    Kafka does not record when a group settled a message, but the group's inbox records when the effect began, by the
    clock of its database.
    """
    numbers = {name: number for number, name in enumerate(kafka.topics)}
    ordered = [
        (group, numbers[place.topic], place.partition, subscribed.start)
        for (group, place), subscribed in kafka.progress.subscribed.items()
        if subscribed.mode == "ordered" and place.topic in numbers
    ]
    effects = [
        rows.withColumn("database", F.lit(number))
        for number, database in enumerate(databases)
        if ordered and (rows := database.effects(spark, span)) is not None
    ]
    if not effects:
        return [], 0
    columns = {"group": pa.string(), "topic": pa.int64(), "queue": pa.int32(), "start": pa.int64()}
    subscriptions = small_table(spark, columns, ordered)
    late = _late(spark, kafka, reduce(DataFrame.unionAll, effects), subscriptions)
    cases = []
    late_rows, count = searches.most_of(searches.within(late, span))
    for row in late_rows:
        cases.append(
            Found(
                "DISORDER", ids.to_text(bytes(row["id"])), row["no"],
                f"offset {row['offset']} took effect in group {row['group']} after {row['highest']} of the same key",
                kafka.topics[row["topic"]], row["queue"], row["offset"], "", [row["group"]], row["effect_us"],
                databases[row["database"]].name, kafka.name,
                {"effect_us": row["effect_us"], "after_offset": row["highest"]},
            )
        )  # fmt: skip
    return cases, count


def _late(spark: SparkSession, kafka: KafkaInput, effects: DataFrame, subscriptions: DataFrame) -> DataFrame:
    """The late effects, each with its place and the `highest` offset that took effect before it."""
    first = (
        effects.withColumnRenamed("consumer_group", "group")
        .groupBy("id", "no", "group", "database")
        .agg(F.min("at_us").alias("effect_us"))
        # A dead letter that was sent again may be late.
        .join(kafka.dead(spark), ["id", "no", "group"], "left_anti")
    )
    places = (
        kafka.queued(spark)
        .where(F.col("key").isNotNull())
        .groupBy("id", "no", "topic", "queue", "key")
        .agg(F.min("offset").alias("offset"))
    )
    received = (
        places.join(first, ["id", "no"])
        .join(F.broadcast(subscriptions), ["group", "topic", "queue"])
        .where(F.col("offset") >= F.col("start"))
    )
    before = (
        Window.partitionBy("group", "database", "topic", "queue", "key")
        .orderBy("effect_us", "offset")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    return received.withColumn("highest", F.max("offset").over(before)).where("highest > offset")
