"""One row for each message of the audited range, joined from every input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import InvalidRequest
from notify.spark import findings, life, searches
from notify.spark.columns import SOURCE, source_hash
from notify.spark.coverage import Coverage
from notify.spark.databases import Database
from notify.spark.kafka_input import KafkaInput
from notify.spark.life import Groups
from notify.spark.log_input import LogInput
from notify.spark.result import Inputs
from notify.spark.small_table import small_table


class MessageRows:
    """Reads and joins what the inputs know of each message."""

    def __init__(self, spark: SparkSession, inputs: Inputs, groups: Groups, coverage: Coverage) -> None:
        self._spark = spark
        self._inputs = inputs
        self._groups = groups
        self._coverage = coverage
        with_rows: set[str] = set()
        for database in inputs.databases:
            with_rows |= database.producer_groups()
        in_queues = {name for log in inputs.logs for name in log.catalog.producer_groups.values() if name}
        for kafka in inputs.kafka:
            in_queues |= kafka.producer_groups(spark)
        self._origins = coverage.origins
        hashed = hashes(spark, sorted(with_rows | in_queues))
        self.producer_groups = {value: name for name, value in hashed.items()}
        """The name of each producer group by its hash, which rows hold."""
        self.uncovered = sorted(in_queues - with_rows)
        """Producer groups without a local row: they use a database that was not given."""
        covered = frozenset(hashed[name] for name in with_rows)
        self.terms = dataclasses.replace(coverage.terms, covered_groups=covered)

    def read(self) -> DataFrame:
        """The rows, with the classes of findings that each one is in."""
        groups, coverage = self._groups, self._coverage
        together = life.together(self._parts(), groups)
        # A row with nothing but acks belongs to a message outside of the audited range.
        event = findings.event_us(coverage.terms.slack_us)
        together = together.where(event.isNotNull() & (event >= coverage.from_us) & (event < coverage.to_us))
        joined = self._with_expected(together)
        return findings.with_facts(joined, self.terms, groups).withColumn("classes", findings.classes()).select(
            "id", "no", "event_us", "t_us", "t_state", "topic", "other_topic", "digest", "other_digest",
            "producer_group", "origin", "half_us", "outcomes", "due_us", "queued_us", "place", "offset", "places",
            "acked_us", "last_acked_us", "effect_us", "is_closed", "classes",
            *[f"{m}{b}" for m in (*life.MASKS, "expected", "readers") for b in range(groups.blocks)],
        )  # fmt: skip

    def _parts(self) -> list[DataFrame]:
        """The knowledge of each input, as rows of one shape."""
        groups, span = self._groups, self._coverage.span
        parts: list[DataFrame] = []
        for number, log in enumerate(self._inputs.logs):
            parts += self._of_log(log, number)
        for number, kafka in enumerate(self._inputs.kafka, len(self._inputs.logs)):
            parts.append(searches.within(kafka.messages(self._spark, groups, number), span))
        for storage in self._inputs.storages:
            halves = storage.halves(self._spark, span)
            if halves is None:
                raise InvalidRequest(
                    f"--storage {storage.name}: it has no table server_half_message; run notify storage upgrade"
                )
            # A bridge may have any name, and a relay adds to its database's.
            is_known = F.col("source").rlike(SOURCE)
            parts.append(life.of_halves(halves.withColumn("origin", self._origin(str, is_known)), groups))
        for number, database in enumerate(self._inputs.databases):
            parts += self._of_database(database, number)
        return parts

    def _of_database(self, database: Database, number: int) -> list[DataFrame]:
        groups, span = self._groups, self._coverage.span
        parts = []
        rows = database.local_rows(self._spark, span)
        if rows is not None:
            parts.append(life.of_local_rows(rows, number, groups))
        effects = database.effects(self._spark, span)
        if effects is not None:
            bits = F.broadcast(groups.table(self._spark))
            named = effects.withColumnRenamed("consumer_group", "group").join(bits, "group", "left")
            parts.append(life.of_effects(searches.within(named, span), groups))
        return parts

    def _with_expected(self, together: DataFrame) -> DataFrame:
        """The rows with the groups that were to receive each message."""
        joined = together.join(F.broadcast(self._expected()), "place", "left")
        subscribed = F.col("subscribed")
        for b in range(self._groups.blocks):
            due = F.filter(subscribed, lambda s: F.col("offset") >= s["start"])
            joined = joined.withColumn(f"expected{b}", _mask(due, b))
        return joined.drop("subscribed")

    def _origin(self, number_of: Callable[[str], Any], is_known: Column) -> Column:
        """The number of the database that a row's `source` stands for. `number_of`: how the column holds a source;
        `is_known`: whether it holds one at all."""
        number = F.when(~is_known, F.lit(None))
        for source, database in self._origins.items():
            number = number.when(F.col("source") == number_of(source), F.lit(database))
        return number.otherwise(F.lit(life.ABROAD)).cast("int")

    def _of_log(self, log: LogInput, number: int) -> list[DataFrame]:
        spark, groups, span = self._spark, self._groups, self._coverage.span
        from_us = span.start_us if span else 0
        messages = log.messages(spark, groups, from_us)
        parts = []
        if messages is not None:
            topics = small_table(
                spark,
                {"topic": pa.int64(), "name": pa.string(), "kind": pa.string()},
                [(n, name, log.catalog.kind_of(name)) for n, name in log.catalog.topics.items()],
            ).select("topic", "kind", F.xxhash64("name").alias("topic_hash"))
            producers = small_table(
                spark,
                {"producer_group": pa.int32(), "name": pa.string()},
                [(n, name) for n, name in log.catalog.producer_groups.items() if name],
            ).select("producer_group", F.xxhash64("name").alias("group_hash"))
            named = (
                messages.join(F.broadcast(topics), "topic", "left")
                .where("kind IS NULL OR kind != 'dead_letter'")
                .join(F.broadcast(producers), "producer_group", "left")
            )
            rows = searches.within(named, span).withColumn(
                "origin", self._origin(source_hash, F.col("source").isNotNull())
            )
            parts.append(life.of_messages(rows, groups, number))
        acks = log.acks(spark, from_us, loose_only=True)
        if acks is not None:
            bits = F.broadcast(groups.table(spark))
            # The progress of one instance in a broadcast says nothing about its group.
            parts.append(life.of_acks(searches.within(acks.join(bits, "group"), span), groups))
        return parts

    def _expected(self) -> DataFrame:
        """(place, subscribed, readers0, …): for each queue the groups that are to receive it, and from which offset on;
        and a mask of those that ever subscribed to it."""
        groups = self._groups
        rows: list[tuple[Any, ...]] = []
        inputs: list[LogInput | KafkaInput] = [*self._inputs.logs, *self._inputs.kafka]
        for number, queues in enumerate(inputs):
            wanted = queues.wanted()
            # Kafka forgets groups that read it long ago: there, nobody is strange.
            readers = queues.readers() if isinstance(queues, LogInput) else {}
            for topic, queue in sorted(wanted.keys() | readers.keys()):
                subscribed = [self._subscribed(group, start) for group, start in wanted.get((topic, queue), ())]
                known = sorted(readers.get((topic, queue), groups.names))
                masks = [groups.mask([g for g in known if g in groups.names], b) for b in range(groups.blocks)]
                rows.append((life.place_of(number, topic, queue), subscribed, *masks))
        one = pa.struct([(n, pa.int64()) for n in ("start", *_bit_names(groups))])
        columns = {"place": pa.int64(), "subscribed": pa.list_(one)}
        columns |= {f"readers{b}": pa.int64() for b in range(groups.blocks)}
        return small_table(self._spark, columns, rows)

    def _subscribed(self, group: str, start: int) -> dict[str, int]:
        bits = {name: self._groups.bit(group, b) for b, name in enumerate(_bit_names(self._groups))}
        return {"start": start} | bits


def hashes(spark: SparkSession, names: Sequence[str]) -> dict[str, int]:
    """The hash of each name as rows hold it (xxhash64 of Spark)."""
    if not names:
        return {}
    table = small_table(spark, {"name": pa.string()}, [(name,) for name in names])
    return {row[0]: row[1] for row in table.select("name", F.xxhash64("name")).collect()}


def _bit_names(groups: Groups) -> list[str]:
    return [f"bit{b}" for b in range(groups.blocks)]


def _mask(subscribed: Column, block: int) -> Column:
    """The mask of the groups of some subscriptions."""
    return F.aggregate(subscribed, F.lit(0).cast("bigint"), lambda mask, s: mask.bitwiseOR(s[f"bit{block}"]))
