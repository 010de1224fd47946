"""One audit: it reads every input, joins each message's rows, classifies the contradictions, and gives a verdict.

It reads the downstream inputs first: the log before the databases. So whatever the log shows, the databases show too;
a row that a database committed after the log's watermark is PENDING, not LOST.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify import ids
from notify.errors import InvalidRequest
from notify.spark import findings, life, searches
from notify.spark.databases import Span
from notify.spark.evidence import STATES, detail
from notify.spark.findings import BAD, BY_NAME, SKEW_US, Terms
from notify.spark.life import Groups
from notify.spark.log_input import LogInput
from notify.spark.report.histogram import STEPS
from notify.spark.result import LATENCIES, Found, Inputs, Plan, Result
from notify.spark.scan import COMMITTED
from notify.spark.session import PARTITIONS
from notify.spark.small_table import small_table

_BYPASS = "spark.sql.execution.bypassPartialAggregation"
ROWS_A_PARTITION = 300_000
MOST_PARTITIONS = 2000


class Audit:
    """Runs a plan. `progress` is called with the name of each step."""

    def __init__(
        self,
        spark: SparkSession,
        plan: Plan,
        inputs: Inputs,
        scratch: Path,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        if plan.to_us and plan.from_us >= plan.to_us:
            raise InvalidRequest("--from must be before --to")
        if not inputs.databases:
            raise InvalidRequest("an audit needs a --database: all other inputs are compared with what it committed")
        if not (inputs.logs or inputs.kafka):
            raise InvalidRequest("an audit needs a --log or a --kafka, which the messages were written to")
        names = [d.name for d in inputs.databases]
        if len(set(names)) < len(names):
            raise InvalidRequest("two databases have the same name: give them as --database NAME=URL")
        self._spark = spark
        self._plan = plan
        self._inputs = inputs
        self._scratch = scratch
        self._progress = progress
        self.result = Result()
        self._mark = time.monotonic()

    def _step(self, name: str) -> None:
        now = time.monotonic()
        self.result.steps[name] = round(now - self._mark, 2)
        self._mark = now

    def run(self) -> Result:
        """Raises InvalidRequest, Unavailable or Corrupt if an input cannot be read at all."""
        started = self._mark = time.monotonic()
        result = self.result
        self._prepare()
        self._step("copy the log")
        self._bounds()
        partitions = self._partitions()
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        # Adaptive planning after each stage pays off for long stages; it triples the jobs of a small audit.
        is_large = partitions > self._spark.sparkContext.defaultParallelism
        self._spark.conf.set("spark.sql.adaptive.enabled", str(is_large).lower())
        self._progress("reading the databases")
        # A part rarely holds two rows of a message, so aggregating before the shuffle would only cost time.
        self._spark.conf.set(_BYPASS, "true")
        rows = self._life().persist(StorageLevel.MEMORY_AND_DISK)
        self._spark.conf.set(_BYPASS, "false")
        try:
            self._measure(rows)
            self._step("join")
            self._progress("collecting findings")
            self._collect(rows)
            self._look_for_repairs()
            self._step("findings")
            self._latencies(rows)
            self._step("latencies")
        finally:
            rows.unpersist()
        self._special()
        self._step("order, damage, gaps, effects")
        self._judge()
        result.seconds = round(time.monotonic() - started, 2)
        return result

    # --- inputs -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for log in self._inputs.logs:
            self._progress(f"reading log {log.name}: {len(log.segments)} segments")
            log.prepare(self._spark, self._scratch)
            self.result.reasons += [f"log {log.name}: {problem}" for problem in log.problems]
        for kafka in self._inputs.kafka:
            self._progress(f"asking Kafka at {kafka.brokers}")
            kafka.prepare()
        names: list[str] = []
        for log in self._inputs.logs:
            names += log.groups()
        for kafka in self._inputs.kafka:
            names += kafka.groups()
        self._inbox_groups = frozenset(g for d in self._inputs.databases for g in d.inbox_groups())
        self._groups = Groups([n for n in (*names, *sorted(self._inbox_groups)) if "@" not in n])

    def _partitions(self) -> int:
        """The number of shuffle partitions: each fits in memory, and a small audit starts no hundred empty tasks."""
        messages = sum(log.count_from(self._span()) for log in self._inputs.logs)
        if self._inputs.kafka:
            messages = max(messages, ROWS_A_PARTITION * PARTITIONS)
        cores = self._spark.sparkContext.defaultParallelism
        return max(min(cores, 1 + messages // 10_000), min(MOST_PARTITIONS, messages // ROWS_A_PARTITION))

    def _bounds(self) -> None:
        """Set the audited range, the watermark, and the time before which transactions are closed."""
        plan, result = self._plan, self.result
        now_us = time.time_ns() // 1000
        longest_us = round(plan.max_transaction_seconds * 1e6)
        watermarks: list[int] = []
        rows_from = inbox_from = log_from = 0
        for database in self._inputs.databases:
            rows, inbox = database.purged()
            rows_from, inbox_from = max(rows_from, rows), max(inbox_from, inbox)
            watermarks.append(database.now_us)
            result.inputs.append(
                {"input": f"database {database.name}", "kind": database.kind, "watermark_us": database.now_us,
                 "from_us": rows, "detail": f"clock {database.clock_offset_us / 1e6:+.3f} s"}
            )  # fmt: skip
        for log in self._inputs.logs:
            log_from = max(log_from, log.first_us)
            watermarks.append(log.watermark_us)
            state = "a server has it open" if log.is_served else "no server has it open"
            detail = f"{len(log.facts)} segments, {sum(f.messages for f in log.facts)} messages; {state}"
            result.inputs.append(
                {"input": f"log {log.name}", "kind": "log", "watermark_us": log.watermark_us, "from_us": log.first_us,
                 "detail": detail}
            )  # fmt: skip
        for kafka in self._inputs.kafka:
            log_from = max(log_from, kafka.first_us)
            watermarks.append(kafka.watermark_us)
            result.inputs.append(
                {"input": f"kafka {kafka.brokers}", "kind": "kafka", "watermark_us": kafka.watermark_us,
                 "from_us": kafka.first_us, "detail": f"{len(kafka.topics)} topics"}
            )  # fmt: skip
        for storage in self._inputs.storages:
            watermarks.append(storage.now_us)
            result.inputs.append(
                {"input": f"storage {storage.name}", "kind": storage.kind, "watermark_us": storage.now_us,
                 "from_us": 0, "detail": "halves and outcomes"}
            )  # fmt: skip
        whole_from = max(rows_from, log_from)
        if plan.from_us and plan.from_us < whole_from:
            result.reasons.append(
                f"--from is before {_text(whole_from)}: older local rows were purged, or older segments deleted"
            )
        result.from_us = max(plan.from_us, whole_from)
        result.to_us = plan.to_us or now_us
        self._watermark_us = now_us if plan.closes_by_clock else min(watermarks)
        skew = max((abs(d.clock_offset_us) for d in self._inputs.databases), default=0)
        result.closed_us = min(result.to_us, self._watermark_us - longest_us - skew)
        self._terms = Terms(
            closed_before_us=self._watermark_us - longest_us - skew,
            settled_before_us=self._watermark_us - round(plan.deliver_seconds * 1e6),
            covered_groups=frozenset(),
            inbox_groups=self._inbox_groups,
            rows_from_us=rows_from,
            inbox_from_us=inbox_from,
            log_from_us=log_from,
        )

    def _span(self) -> Span | None:
        """The range of ids that transactions in the audited range can have; None: all ids."""
        if not self._plan.from_us and not self._plan.to_us:
            return None
        slack = SKEW_US + round(self._plan.max_transaction_seconds * 1e6)
        end = self.result.to_us + slack if self._plan.to_us else 1 << 52
        return Span(max(0, self.result.from_us - slack), end)

    # --- one row a message ------------------------------------------------------------------------------------

    def _life(self) -> DataFrame:
        groups, span = self._groups, self._span()
        parts: list[DataFrame] = []
        for number, log in enumerate(self._inputs.logs):
            parts += self._of_log(log, number, span)
        for number, kafka in enumerate(self._inputs.kafka, len(self._inputs.logs)):
            parts.append(searches.within(kafka.messages(self._spark, groups, number), span))
        for storage in self._inputs.storages:
            halves = storage.halves(self._spark, span)
            if halves is None:
                raise InvalidRequest(
                    f"--storage {storage.name}: it has no table server_half_message; run notify storage upgrade"
                )
            parts.append(life.of_halves(halves, groups))
        bits = F.broadcast(groups.table(self._spark))
        for number, database in enumerate(self._inputs.databases):
            rows = database.local_rows(self._spark, span)
            if rows is not None:
                parts.append(life.of_local_rows(rows, number, groups))
            effects = database.effects(self._spark, span)
            if effects is not None:
                named = effects.withColumnRenamed("consumer_group", "group").join(bits, "group", "left")
                parts.append(life.of_effects(searches.within(named, span), groups))
        together = life.together(parts, groups)
        # A row with nothing but acks belongs to a message outside of the audited range.
        event = findings.event_us()
        together = together.where(event.isNotNull() & (event >= self.result.from_us) & (event < self.result.to_us))
        expected = F.broadcast(self._expected())
        joined = together.join(expected, "place", "left")
        subscribed = F.col("subscribed")
        for b in range(groups.blocks):
            due = F.filter(subscribed, lambda s: F.col("offset") >= s["start"])
            joined = joined.withColumn(f"expected{b}", _mask(due, b))
            if self._inputs.kafka:
                done = F.filter(subscribed, lambda s: F.col("offset") < s["committed"])
                zero = F.lit(0).cast("bigint")
                settled = F.coalesce(f"settled{b}", zero).bitwiseOR(F.coalesce(_mask(done, b), zero))
                joined = joined.withColumn(f"settled{b}", settled)
        joined = joined.drop("subscribed")
        self._cover()
        return findings.with_facts(joined, self._terms, groups).withColumn("classes", findings.classes()).select(
            "id", "no", "event_us", "t_us", "t_state", "topic", "producer_group", "half_us", "outcomes", "due_us",
            "queued_us", "place", "offset", "places", "acked_us", "last_acked_us", "effect_us", "is_closed", "classes",
            *[f"{m}{b}" for m in (*life.MASKS, "expected") for b in range(groups.blocks)],
        )  # fmt: skip

    def _of_log(self, log: LogInput, number: int, span: Span | None) -> list[DataFrame]:
        spark, groups = self._spark, self._groups
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
            parts.append(life.of_messages(searches.within(named, span), groups, number))
        acks = log.acks(spark, from_us, loose_only=True)
        if acks is not None:
            bits = F.broadcast(groups.table(spark))
            # The progress of one instance in a broadcast says nothing about its group.
            parts.append(life.of_acks(searches.within(acks.join(bits, "group"), span), groups))
        return parts

    def _expected(self) -> DataFrame:
        """(place, subscribed): for each queue the groups that are to receive it, and from which offset on."""
        groups = self._groups
        rows: list[tuple[int, list[dict[str, int]]]] = []
        for number, log in enumerate(self._inputs.logs):
            rows += [
                (life.place_of(number, topic, queue), [self._subscribed(group, start, 0) for group, start in wanted])
                for (topic, queue), wanted in log.wanted().items()
            ]
        for number, kafka in enumerate(self._inputs.kafka, len(self._inputs.logs)):
            rows += [
                (
                    life.place_of(number, topic, queue),
                    [self._subscribed(group, 0, committed) for group, committed in wanted],
                )
                for (topic, queue), wanted in kafka.wanted().items()
            ]
        subscribed = pa.struct([(n, pa.int64()) for n in ("start", "committed", *_bit_names(groups))])
        return small_table(self._spark, {"place": pa.int64(), "subscribed": pa.list_(subscribed)}, rows)

    def _subscribed(self, group: str, start: int, committed: int) -> dict[str, int]:
        bits = {name: self._groups.bit(group, b) for b, name in enumerate(_bit_names(self._groups))}
        return {"start": start, "committed": committed} | bits

    def _cover(self) -> None:
        """Find the producer groups whose local rows were read. A group without rows uses a database not given."""
        names: set[str] = set()
        for database in self._inputs.databases:
            names |= database.producer_groups()
        known: set[str] = set()
        for log in self._inputs.logs:
            known |= {n for n in log.catalog.producer_groups.values() if n}
        hashes = self._hashes(sorted(names | known))
        self._names = {value: name for name, value in hashes.items()}
        self._terms = Terms(
            **{
                **self._terms.__dict__,
                "covered_groups": frozenset(hashes[n] for n in names),
            }
        )
        if known - names:
            listed = ", ".join(sorted(known - names)[:20])
            self.result.notes.append(
                f"not checked for GHOST, because no given database has rows of these producer groups: {listed}"
            )

    def _hashes(self, names: Sequence[str]) -> dict[str, int]:
        if not names:
            return {}
        rows = small_table(self._spark, {"name": pa.string()}, [(n,) for n in names])
        return {row[0]: row[1] for row in rows.select("name", F.xxhash64("name")).collect()}

    # --- what comes out ---------------------------------------------------------------------------------------

    def _measure(self, rows: DataFrame) -> None:
        """Count messages by bucket, topic and class."""
        bucket_us = round(self._plan.bucket_seconds * 1e6)
        names = [f.name for f in findings.FINDINGS if f.when is not None]
        committed = F.col("t_state").bitwiseAND(3) == COMMITTED
        queued = F.col("place").isNotNull()
        counted = rows.groupBy((F.col("event_us") / bucket_us).cast("bigint").alias("bucket"), "topic").agg(
            F.count("id").alias("messages"),
            F.count_if(committed).alias("committed"),
            F.count_if(committed & queued).alias("queued"),
            F.count_if(queued).alias("in_queues"),
            F.count_if(queued & F.col("acked_us").isNotNull()).alias("acknowledged"),
            F.count_if(F.col("effect_us").isNotNull()).alias("effects"),
            F.count_if(F.col("t_state").isNotNull()).alias("rows"),
            F.count_if(F.col("half_us").isNotNull()).alias("halves"),
            F.count_if(F.col("is_closed")).alias("closed"),
            F.max("t_us").alias("newest_row_us"),
            *[F.count_if(findings.has(n)).alias(n) for n in names],
        )
        buckets = [row.asDict() for row in counted.collect()]
        topics = {h: n for n, h in self._hashes(sorted(self._topic_names())).items()}
        self._topics = topics
        result = self.result
        for row in buckets:
            row["topic"] = topics.get(row["topic"], "")
            row["at_us"] = row.pop("bucket") * bucket_us
        result.buckets = sorted(buckets, key=lambda r: (r["at_us"], r["topic"]))
        for name in (
            "messages",
            "committed",
            "queued",
            "in_queues",
            "acknowledged",
            "effects",
            "rows",
            "halves",
            "closed",
        ):
            result.totals[name] = sum(row[name] for row in buckets)
        self._newest_row_us = max((row["newest_row_us"] or 0 for row in buckets), default=0)
        result.counts = {f.name: sum(row.get(f.name, 0) for row in buckets) for f in findings.FINDINGS}

    def _topic_names(self) -> set[str]:
        names = {n for log in self._inputs.logs for n in log.catalog.topics.values()}
        return names | {n for kafka in self._inputs.kafka for n in kafka.topics}

    def _collect(self, rows: DataFrame) -> None:
        """Collect the evidence: one query for all classes that fit whole, and one for each class that does not."""
        counts = {name: count for name, count in self.result.counts.items() if count and name != "PENDING"}
        most = {name: searches.MOST_FINDINGS if BY_NAME[name].is_bad else 1000 for name in counts}
        whole = [name for name, count in counts.items() if count <= most[name]]
        cases: dict[str, list[Found]] = {name: [] for name in counts}
        if whole:
            for row in rows.where(findings.has(*whole)).collect():
                evidence = row.asDict()
                for name in whole:
                    if evidence["classes"] & findings.bit_of(name):
                        cases[name].append(self._found(name, dict(evidence)))
        for name in counts.keys() - set(whole):
            part = rows.where(findings.has(name)).limit(most[name])
            cases[name] = [self._found(name, row.asDict()) for row in part.collect()]
        for several in cases.values():
            self.result.found += several

    def _look_for_repairs(self) -> None:
        """Mark repaired findings: the id of a repeated message follows from the original id, and is in a queue."""
        by_id: dict[bytes, list[Found]] = {}
        for case in self.result.found:
            if not case.transaction_id:
                continue
            transaction = ids.from_text(case.transaction_id)
            salts: list[bytes] = []
            if case.finding in ("LOST", "CONFLICT") and case.evidence["local"] == "COMMITTED":
                salts = [ids.republished(case.message_no)]
            elif case.finding == "ACKED_NO_EFFECT":
                salts = [ids.redelivered(group, case.message_no) for group in case.groups]
            for salt in salts:
                by_id.setdefault(ids.derived(transaction, salt), []).append(case)
        if not by_id:
            return
        wanted = F.broadcast(small_table(self._spark, {"id": pa.binary()}, [(i,) for i in by_id]))
        tables = [log.messages(self._spark, self._groups) for log in self._inputs.logs]
        tables += [kafka.messages(self._spark, self._groups, 0) for kafka in self._inputs.kafka]
        in_queues: set[bytes] = set()
        for table in tables:
            if table is not None:
                queued = table.where(F.col("offset").isNotNull()).select("id")
                in_queues |= {bytes(row["id"]) for row in queued.join(wanted, "id").distinct().collect()}
        for again, several in by_id.items():
            for case in several:
                case.evidence["repairs"] = case.evidence.get("repairs", 0) + (again in in_queues)
        for case in self.result.found:
            wanted_repairs = len(case.groups) if case.finding == "ACKED_NO_EFFECT" else 1
            if case.evidence.pop("repairs", 0) == wanted_repairs:
                case.evidence["repaired"] = True
                self.result.counts[case.finding] -= 1
                self.result.totals["repaired"] = self.result.totals.get("repaired", 0) + 1

    def _found(self, name: str, row: dict[str, Any]) -> Found:
        groups = self._groups

        def masks(kind: str) -> list[int]:
            return [row[f"{kind}{b}"] or 0 for b in range(groups.blocks)]

        case = Found(name, ids.to_text(bytes(row["id"])), row["no"], at_us=row["event_us"])
        case.topic = self._topics.get(row["topic"], "")
        case.producer_group = self._names.get(row["producer_group"], "")
        state = row["t_state"]
        row["local"] = (state or 0) & 3
        if state is not None:
            case.database = self._inputs.databases[state // life.DATABASE].name
        if row["place"] is not None:
            number, _, case.queue = life.parts_of_place(row["place"])
            case.offset = row["offset"]
            if number < len(self._inputs.logs):
                case.log = self._inputs.logs[number].name
        expected, settled = masks("expected"), masks("settled")
        if name == "UNDELIVERED":
            case.groups = groups.of([e & ~s for e, s in zip(expected, settled, strict=True)])
        elif name == "ACKED_NO_EFFECT":
            inboxes = [groups.mask(sorted(self._terms.inbox_groups), b) for b in range(groups.blocks)]
            case.groups = groups.of(
                [a & i & ~e for a, i, e in zip(masks("acked"), inboxes, masks("effects"), strict=True)]
            )
        elif name == "REDELIVERED":
            case.groups = groups.of(masks("attempted"))
        case.detail = detail(name, row, case)
        times = ("t_us", "half_us", "due_us", "queued_us", "acked_us", "effect_us")
        case.evidence = {key: row[key] for key in times if row[key] is not None}
        case.evidence |= {
            "local": STATES.get(row["local"], "no row"),
            "server": STATES.get(row["outcomes"], "PREPARED" if row["half_us"] else "unknown"),
            "mode": "" if state is None else "outbox" if state & life.OUTBOX else "half",
        }
        return case

    def _latencies(self, rows: DataFrame) -> None:
        """Count latencies in bins, all kinds in one query: a row counts for each kind whose two times it has."""
        bucket_us = round(self._plan.bucket_seconds * 1e6)
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
            topic = self._topics.get(row["topic"], "")
            histograms[row["kind"]].append((row["bucket"] * bucket_us, topic, row["bin"], row["count"]))
        self.result.latencies = {kind: sorted(several) for kind, several in histograms.items()}

    # --- what needs more than a message's row -----------------------------------------------------------------

    def _special(self) -> None:
        result = self.result
        for log in self._inputs.logs:
            self._add(
                "CORRUPT",
                [searches.corrupt(log, broken) for broken in log.broken() if self._in_time(broken["time_us"])],
            )
            self._add("BRIDGE_GAP", [g for g in searches.gaps(log) if self._in_time(g.at_us)])
            self._progress("checking the order")
            self._add("DISORDER", searches.disorder(self._spark, log, self._span()))
        if not self._plan.effects:
            result.not_checked["DUP_EFFECT"] = "name the business effects with --effects"
        for name, query in self._plan.effects:
            database = next((d for d in self._inputs.databases if d.name == name or not name), None)
            if database is None:
                raise InvalidRequest(f"--effects names database {name!r}, which was not given with --database")
            self._add("DUP_EFFECT", searches.doubled(self._spark, database, query, self._between()))
        if self._inputs.kafka and not self._inputs.logs:
            result.not_checked["BRIDGE_GAP"] = "Kafka keeps only the last position of a bridge"
            result.not_checked["DISORDER"] = result.not_checked["REDELIVERED"] = "Kafka keeps no record of each ack"
            result.not_checked["CORRUPT"] = "Kafka verifies its own checksums when it reads records"
        if not self._terms.inbox_groups:
            result.not_checked["ACKED_NO_EFFECT"] = "no database given has inbox rows"

    def _between(self) -> tuple[int, int] | None:
        """The audited range, for ids made in [from, to); None: all."""
        return (self.result.from_us, self.result.to_us) if self._span() is not None else None

    def _in_time(self, at_us: int) -> bool:
        return not at_us or self.result.from_us <= at_us < self.result.to_us or not self._plan.from_us

    def _add(self, name: str, cases: list[Found]) -> None:
        self.result.counts[name] = self.result.counts.get(name, 0) + len(cases)
        self.result.found += cases

    # --- the verdict ------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        result, plan = self.result, self._plan
        now_us = time.time_ns() // 1000
        longest_us = round(plan.max_transaction_seconds * 1e6)
        totals = result.totals
        if not totals["rows"]:
            result.reasons.append(
                "no local row lies in the audited range: the messages cannot be compared with anything"
            )
        if not totals["in_queues"]:
            result.reasons.append("no queue has a message in the audited range")
        if not plan.closes_by_clock:
            for entry in result.inputs:
                behind_us = min(self._newest_row_us, now_us) - entry["watermark_us"]
                if behind_us > longest_us and result.counts.get("PENDING"):
                    result.reasons.append(
                        f"{entry['input']} ends at {_text(entry['watermark_us'])}, and the databases have transactions "
                        f"until {_text(self._newest_row_us)}: it is stale, and the time in between cannot be judged"
                    )
        if plan.to_us and result.closed_us < min(plan.to_us, now_us - longest_us - 60_000_000):
            result.reasons.append(f"transactions after {_text(result.closed_us)} are not closed yet, and --to is later")
        if totals["rows"] and not totals["closed"] and result.counts.get("PENDING"):
            result.reasons.append("every transaction in the audited range is still PENDING")
        bad = any(result.counts.get(name) for name in BAD)
        result.verdict = "FINDINGS" if bad else "INCONCLUSIVE" if result.reasons else "PASS"


def _bit_names(groups: Groups) -> list[str]:
    return [f"bit{b}" for b in range(groups.blocks)]


def _mask(subscribed: Column, block: int) -> Column:
    """The mask of the groups of some subscriptions."""
    return F.aggregate(subscribed, F.lit(0).cast("bigint"), lambda mask, s: mask.bitwiseOR(s[f"bit{block}"]))


def _text(us: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(us / 1e6))
