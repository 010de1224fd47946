"""One row for each message of the audited range, joined from every input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import InvalidRequest
from notify.protocol.wire import NO_DATABASE
from notify.spark.checks.late_inboxes import with_late_inboxes
from notify.spark.checks.outbox_waiting import bridged_us, bridges_of
from notify.spark.inputs.changes import Left
from notify.spark.inputs.columns import COMMITTED, ROLLED_BACK, SOURCE, name_hash
from notify.spark.inputs.databases import Database
from notify.spark.inputs.effects import BusinessEffects
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.ranges import Span
from notify.spark.inputs.shards import ids_of
from notify.spark.judge import findings, message_rows
from notify.spark.judge.coverage import Coverage
from notify.spark.judge.message_rows import Groups, mask_of
from notify.spark.judge.message_times import MADE_US, event_us
from notify.spark.result import Inputs
from notify.spark.small_table import small_table


class MessageRows:
    """Reads the rows of each message from all inputs and joins them."""

    def __init__(
        self,
        spark: SparkSession,
        inputs: Inputs,
        groups: Groups,
        coverage: Coverage,
        with_rows: Collection[str],
        effects: Sequence[BusinessEffects] = (),
    ) -> None:
        """`with_rows`: the producer groups that have local rows."""
        self._effects = effects
        self._spark = spark
        self._inputs = inputs
        self._groups = groups
        self._coverage = coverage
        with_rows = set(with_rows)
        in_queues = {name for log in inputs.logs for name in log.catalog.producer_groups.values() if name}
        for kafka in inputs.kafka:
            in_queues |= kafka.producer_groups(spark)
        self._origins = coverage.origins
        hashed = hashes(spark, sorted(with_rows | in_queues))
        self.producer_groups = {value: name for name, value in hashed.items()}
        """The name of each producer group by its hash in rows."""
        self.uncovered = sorted(in_queues - with_rows)
        """The producer groups without a local row: they use a database that was not given."""
        covered = frozenset(hashed[name] for name in with_rows)
        self.terms = dataclasses.replace(coverage.terms, covered_groups=covered)

    def read(self) -> DataFrame:
        """The rows, each with the classes of findings that apply to it."""
        groups, coverage = self._groups, self._coverage
        together = message_rows.together(self._parts(), groups).withColumn("made_us", F.expr(MADE_US))
        # A row that has only acks belongs to a message outside of the audited range.
        event = F.expr(event_us(coverage.terms))
        together = together.where(event.isNotNull() & (event >= coverage.from_us) & (event < coverage.to_us))
        joined = with_late_inboxes(
            self._spark, self._with_expected(together), self._inputs.logs, groups, self.terms.inbox_groups,
            self.terms.inbox_from_us,
        )  # fmt: skip
        judged = findings.judged(joined, self.terms, groups)
        return judged.withColumn("outcomes", F.col("outcomes").bitwiseAND(COMMITTED | ROLLED_BACK)).select(
            "id", "no", "event_us", "t_us", "t_state", "topic", "other_topic", "digest", "other_digest",
            "other_state", "producer_group", "other_producer_group",
            "origin", "half_us", "outcomes", "due_us", "queued_us", "place", "offset", "places",
            "acked_us", "last_acked_us", "effect_us", "is_closed", "classes",
            *[
                f"{m}{b}"
                for m in (*groups.masks, "expected", "readers", "before_inbox", "left")
                for b in range(groups.blocks)
            ],
        )  # fmt: skip

    def _parts(self) -> list[DataFrame]:
        """The rows of each input in the common shape."""
        groups, span = self._groups, self._coverage.span
        parts: list[DataFrame] = []
        for number, log in enumerate(self._inputs.logs):
            parts += self._of_log(log, number)
        for number, kafka in enumerate(self._inputs.kafka, len(self._inputs.logs)):
            parts.append(self._coverage.within(kafka.messages(self._spark, groups, number)))
        for storage in self._inputs.storages:
            halves = storage.halves(self._spark, span)
            if halves is None:
                raise InvalidRequest(
                    f"--storage {storage.name}: it has no table server_half_message; run notify storage upgrade"
                )
            # Only a database id names an origin: a bridge may have any name, and a relay adds a prefix to the id.
            has_origin = F.col("source").rlike(SOURCE) | (F.col("source") == NO_DATABASE)
            halves = halves.withColumn("origin", self._origin(str, has_origin))
            passed_us = bridged_us(ids_of(storage), bridges_of(self._inputs.logs, self._inputs.kafka))
            parts.append(message_rows.of_halves(halves, groups, passed_us))
        for number, database in enumerate(self._inputs.databases):
            parts += self._of_database(database, number)
        bits = F.broadcast(groups.table(self._spark))
        for effects in self._effects:
            proven = effects.proven(self._spark, span, self._coverage.drill)
            if proven is not None:
                named = proven.withColumnRenamed("consumer_group", "group").join(bits, "group")
                parts.append(message_rows.of_proven(self._coverage.within(named), groups))
        return parts

    def _of_database(self, database: Database, number: int) -> list[DataFrame]:
        groups, span, drill = self._groups, self._coverage.span, self._coverage.drill
        parts = []
        rows = database.local_rows(self._spark, span, drill)
        if rows is not None:
            parts.append(message_rows.of_local_rows(rows, number, groups))
        effects = database.effects(self._spark, span, drill)
        if effects is not None:
            bits = F.broadcast(groups.table(self._spark))
            named = effects.withColumnRenamed("consumer_group", "group").join(bits, "group", "left")
            parts.append(message_rows.of_effects(self._coverage.within(named), groups))
        return parts

    def _with_expected(self, together: DataFrame) -> DataFrame:
        """The rows, with the groups that should receive each message, and those whose queues it left unsettled."""
        table, has_later, has_left = self._expected()
        joined = together.join(F.broadcast(table), "place", "left")
        started = F.filter(F.col("later"), lambda subscribed: F.col("offset") >= subscribed["start"])
        for block in range(self._groups.blocks):
            expected = F.col(f"always{block}")
            if has_later:  # a function of a list is slow, so it is called only for rows with a list
                late_groups = F.when(F.col("later").isNotNull(), mask_of(started, block)).otherwise(0)
                expected = expected.bitwiseOR(late_groups)
            joined = joined.withColumn(f"expected{block}", expected)
        if not has_left:
            return joined.withColumns({f"left{b}": _nobody() for b in range(self._groups.blocks)})
        gone = F.filter(F.col("gone"), _has_row)
        for block in range(self._groups.blocks):
            left = F.when(F.col("gone").isNotNull(), mask_of(gone, block)).otherwise(_nobody())
            # Over Kafka a group that was moved has settled all that it skipped, as far as its offset tells.
            settled = F.when(F.col("is_skipped"), _nobody()).otherwise(message_rows.mask("settled", block))
            kept = settled.bitwiseOR(message_rows.took_effect(self._groups, block)).bitwiseOR(
                message_rows.mask("expected", block)
            )
            joined = joined.withColumn(f"left{block}", left.bitwiseAND(F.bitwise_not(kept)))
        return joined

    def _origin(self, value_of: Callable[[str], Any], has_source: Column) -> Column:
        """The number of the database that the column `source` names.

        `value_of`: the value of the column for a source id. `has_source`: whether the column names a database, or says
        that there is none.
        """
        number = F.when(~has_source, F.lit(None))
        for source, database in self._origins.items():
            number = number.when(F.col("source") == value_of(source), F.lit(database))
        return number.otherwise(F.lit(message_rows.ABROAD)).cast("int")

    def _of_log(self, log: LogInput, number: int) -> list[DataFrame]:
        spark, groups, from_us = self._spark, self._groups, self._coverage.read_from_us
        messages = log.messages(spark, groups, from_us)
        parts = []
        if messages is not None:
            topics = small_table(
                spark,
                {"topic": pa.int64(), "name": pa.string(), "kind": pa.string()},
                [(topic, name, log.catalog.kind_of(name)) for topic, name in log.catalog.topics.items()],
            ).select("topic", "kind", F.xxhash64("name").alias("topic_hash"))
            producers = small_table(
                spark,
                {"producer_group": pa.int32(), "name": pa.string()},
                [(group, name) for group, name in log.catalog.producer_groups.items() if name],
            ).select("producer_group", F.xxhash64("name").alias("group_hash"))
            named = (
                messages.join(F.broadcast(topics), "topic", "left")
                .where("kind IS NULL OR kind != 'dead_letter'")
                .join(F.broadcast(producers), "producer_group", "left")
            )
            rows = self._coverage.within(named).withColumn(
                "origin", self._origin(name_hash, F.col("source").isNotNull())
            )
            parts.append(message_rows.of_messages(rows, groups, number))
        acks = log.acks(spark, from_us, loose_only=True)
        if acks is not None:
            bits = F.broadcast(groups.table(spark))
            # The progress of one instance in a broadcast says nothing about its group.
            parts.append(message_rows.of_acks(self._coverage.within(acks.join(bits, "consumer_group")), groups))
        return parts

    def _expected(self) -> tuple[DataFrame, bool, bool]:
        """The groups that should receive each queue (`place`), and whether any queue has a list `later`, or `gone`.

        The columns are masks of the groups that should receive the whole queue (`always0`, …), a list of the groups
        that should receive it from a later offset on (`later`, or null), a list of what left it (`gone`, or null), and
        masks of the groups that ever subscribed to it (`readers0`, …). `is_skipped`: what left it was not settled.
        """
        groups = self._groups
        blocks = range(groups.blocks)
        rows: list[tuple[Any, ...]] = []
        names = frozenset(groups.names)
        everyone = [groups.mask(groups.names, b) for b in blocks]
        inputs: list[LogInput | KafkaInput] = [*self._inputs.logs, *self._inputs.kafka]
        for number, queues in enumerate(inputs):
            wanted = queues.wanted()
            # Kafka forgets groups that read a topic long ago, so any group may have been a reader.
            readers = queues.readers() if isinstance(queues, LogInput) else {}
            gone = queues.left
            for topic, queue in sorted(wanted.keys() | readers.keys() | gone.keys()):
                starts = wanted.get((topic, queue), ())
                always = [group for group, start in starts if start <= 0]
                later = [self._subscribed(group, start) for group, start in starts if start > 0]
                receive = [groups.mask(always, b) for b in blocks]
                ever = readers.get((topic, queue))
                read = everyone if ever is None else [groups.mask(sorted(ever & names), b) for b in blocks]
                left = [self._gone(each) for each in gone.get((topic, queue), ())]
                place = message_rows.place_of(number, topic, queue)
                rows.append((place, later or None, left or None, isinstance(queues, KafkaInput), *receive, *read))
        late_group = pa.struct([(name, pa.int64()) for name in ("start", *_bit_names(groups))])
        left_group = pa.struct([(name, pa.int64()) for name in ("first", "end", "to_us", *_bit_names(groups))])
        columns = {"place": pa.int64(), "later": pa.list_(late_group), "gone": pa.list_(left_group)}
        columns |= {"is_skipped": pa.bool_()}
        columns |= {f"{name}{b}": pa.int64() for name in ("always", "readers") for b in blocks}
        return small_table(self._spark, columns, rows), any(row[1] for row in rows), any(row[2] for row in rows)

    def _subscribed(self, group: str, start: int) -> dict[str, int]:
        return {"start": start} | self._bits(group)

    def _gone(self, left: Left) -> dict[str, int]:
        return {"first": left.first, "end": left.end, "to_us": left.queued_to_us} | self._bits(left.group)

    def _bits(self, group: str) -> dict[str, int]:
        return {name: self._groups.bit(group, b) for b, name in enumerate(_bit_names(self._groups))}


def producer_groups(inputs: Inputs, known: Collection[str] = (), span: Span | None = None) -> set[str]:
    """The producer groups that have local rows: the `known` groups and those with rows in `span`.

    If no group is known, each table is read as a whole.
    """
    within = span if known else None
    return {group for database in inputs.databases for group in database.producer_groups(within)}.union(known)


def hashes(spark: SparkSession, names: Sequence[str]) -> dict[str, int]:
    """The hash of each name that rows have in place of it (Spark's xxhash64)."""
    if not names:
        return {}
    table = small_table(spark, {"name": pa.string()}, [(name,) for name in names])
    return {row[0]: row[1] for row in table.select("name", F.xxhash64("name")).collect()}


def _nobody() -> Column:
    """A mask without a group."""
    return F.lit(0).cast("bigint")


def _has_row(left: Column) -> Column:
    """Whether a stretch that left a queue has the row's message."""
    is_between = (F.col("offset") >= left["first"]) & (F.col("offset") < left["end"])
    return is_between & (F.col("queued_us") <= left["to_us"])


def _bit_names(groups: Groups) -> list[str]:
    return [f"bit{b}" for b in range(groups.blocks)]
