"""One audit: it reads every input, joins each message's rows, classifies the contradictions, and gives a verdict.

It reads the downstream inputs first: the log before the databases. So whatever the log shows, the databases show too;
a row that a database committed after the log's watermark is PENDING, not LOST.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from notify.errors import InvalidRequest
from notify.spark import dead, findings, kafka_searches, measures, searches
from notify.spark.cases import Cases
from notify.spark.catalog import Bridged
from notify.spark.coverage import Coverage, cover
from notify.spark.dead import Dead
from notify.spark.findings import BAD, BY_NAME, SKEW_US
from notify.spark.kafka_input import KafkaInput
from notify.spark.life import Groups
from notify.spark.log_input import EVERYTHING
from notify.spark.malformed import malformed
from notify.spark.proof import Proof, refuse_doubled, refuse_foreign
from notify.spark.ranges import Span
from notify.spark.result import Found, Inputs, Plan, Result
from notify.spark.rows import MessageRows, hashes
from notify.spark.verdict import judge

_BYPASS = "spark.sql.execution.bypassPartialAggregation"
ROWS_A_PARTITION = 300_000
REREAD_BYTES = 256 << 20
"""So much of the logs is compared with its copies again in each window of a watch; a single audit compares all."""
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
        unknown = set(plan.fail_on) - BY_NAME.keys()
        if unknown:
            raise InvalidRequest(
                f"--fail-on: there is no class {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}"
            )
        self.result = Result(bad=(*BAD, *plan.fail_on))
        self._mark = time.monotonic()

    def _step(self, name: str) -> None:
        now = time.monotonic()
        self.result.steps[name] = round(now - self._mark, 2)
        self._mark = now

    def run(self) -> Result:
        """Raises InvalidRequest, Unavailable or Corrupt if an input cannot be read at all."""
        try:
            return self._run()
        finally:
            for kafka in self._inputs.kafka:
                kafka.release()

    def _run(self) -> Result:
        started = self._mark = time.monotonic()
        result = self.result
        self._prepare()
        self._step("copy the log")
        coverage = cover(self._plan, self._inputs, self._inbox_groups, result)
        self._configure(coverage)
        self._progress("reading the databases")
        message_rows = MessageRows(self._spark, self._inputs, self._groups, coverage)
        if message_rows.uncovered:
            listed = ", ".join(message_rows.uncovered[:20])
            result.notes.append(
                f"not checked for GHOST, because no given database has rows of these producer groups: {listed}"
            )
        # A part rarely holds two rows of a message, so aggregating before the shuffle would only cost time.
        self._spark.conf.set(_BYPASS, "true")
        rows = message_rows.read().persist(StorageLevel.MEMORY_AND_DISK)
        self._spark.conf.set(_BYPASS, "false")
        try:
            newest_row_us = self._judge_rows(rows, message_rows, coverage)
        finally:
            rows.unpersist()
        self._search(coverage)
        self._search_malformed(coverage)
        self._step("order, damage, gaps, effects")
        judge(self._plan, result, newest_row_us)
        result.seconds = round(time.monotonic() - started, 2)
        return result

    def _configure(self, coverage: Coverage) -> None:
        partitions = self._partitions(coverage)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        # Adaptive planning after each stage pays off for long stages; it triples the jobs of a small audit.
        is_large = partitions > self._spark.sparkContext.defaultParallelism
        self._spark.conf.set("spark.sql.adaptive.enabled", str(is_large).lower())

    def _judge_rows(self, rows: DataFrame, message_rows: MessageRows, coverage: Coverage) -> int:
        """Figures and cases of the messages' rows; the time of the newest local row."""
        result = self.result
        bucket_us = round(self._plan.bucket_seconds * 1e6)
        topics = {value: name for name, value in hashes(self._spark, sorted(self._topic_names())).items()}
        blocks = self._groups.blocks
        result.buckets = measures.count(rows, bucket_us, topics, blocks)
        done = [reduce(or_, (bucket.pop(f"done{b}") or 0 for bucket in result.buckets), 0) for b in range(blocks)]
        proof = Proof(self._inputs, result, coverage.from_us, coverage.to_us)
        proof.of_inboxes(self._groups.of(done))
        for name in measures.TOTALS:
            result.totals[name] = sum(bucket[name] for bucket in result.buckets)
        result.counts = {f.name: sum(bucket.get(f.name, 0) for bucket in result.buckets) for f in findings.FINDINGS}
        self._step("join")
        self._progress("collecting findings")
        cases = Cases(
            self._spark, self._inputs, self._groups,
            inbox_groups=self._inbox_groups, topics=topics, producer_groups=message_rows.producer_groups,
        )  # fmt: skip
        result.found += cases.collect(rows, result.counts)
        for case in cases.came_later(result.found):
            result.found.remove(case)
            result.counts[case.finding] -= 1
        repaired = cases.mark_repaired(result.found)
        for name, number in repaired.items():
            result.counts[name] -= number
        if repaired:
            result.totals["repaired"] = repaired.total()
        self._step("findings")
        result.latencies = measures.latencies(rows, bucket_us, topics)
        self._step("latencies")
        return max((bucket["newest_row_us"] or 0 for bucket in result.buckets), default=0)

    def _topic_names(self) -> set[str]:
        names = {n for log in self._inputs.logs for n in log.catalog.topics.values()}
        return names | {n for kafka in self._inputs.kafka for n in kafka.topics}

    # --- inputs -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        refuse_doubled(self._inputs)
        for log in self._inputs.logs:
            self._progress(f"reading log {log.name}: {len(log.segments)} segments")
            log.prepare(self._spark, self._scratch, REREAD_BYTES if self._plan.closes_by_clock else EVERYTHING)
            self.result.reasons += [f"log {log.name}: {problem}" for problem in log.problems]
        refuse_foreign(self._inputs)
        # As for ids, and as long again for the records' own times.
        slack_us = 2 * (SKEW_US + round(max(self._plan.max_transaction_seconds, self._plan.deliver_seconds) * 1e6))
        for kafka in self._inputs.kafka:
            self._progress(f"asking Kafka at {kafka.brokers}")
            kafka.prepare(max(0, self._plan.from_us - slack_us), self._plan.to_us + slack_us if self._plan.to_us else 0)
        names: list[str] = []
        for log in self._inputs.logs:
            names += log.groups()
        for kafka in self._inputs.kafka:
            names += kafka.groups()
        self._inbox_groups = frozenset(g for d in self._inputs.databases for g in d.inbox_groups())
        # An instance of a broadcast (`group@instance`) says nothing about its group.
        self._groups = Groups([n for n in (*names, *sorted(self._inbox_groups)) if "@" not in n])

    def _partitions(self, coverage: Coverage) -> int:
        """The number of shuffle partitions: each fits in memory, and a small audit starts no hundred empty tasks."""
        messages = sum(log.count_from(coverage.span) for log in self._inputs.logs)
        messages += sum(kafka.count for kafka in self._inputs.kafka)
        cores = self._spark.sparkContext.defaultParallelism
        return max(min(cores, 1 + messages // 10_000), min(MOST_PARTITIONS, messages // ROWS_A_PARTITION))

    # --- what needs more than a message's row -----------------------------------------------------------------

    def _search(self, coverage: Coverage) -> None:
        """Look for what needs more than one message's row."""
        result = self.result
        for log in self._inputs.logs:
            self._add(
                "CORRUPT",
                [searches.corrupt(log, broken) for broken in log.broken() if coverage.holds(broken["time_us"])],
            )
            self._add_gaps(coverage, log.name, log.catalog.bridges)
            self._progress("checking the order")
            self._add("DISORDER", *searches.disorder(self._spark, log, coverage.span))
            self._add_dead(dead.of_log(self._spark, log, coverage.from_us, coverage.to_us))
        if not self._plan.effects:
            result.not_checked["DUP_EFFECT"] = "name the business effects with --effects"
        for name, query in self._plan.effects:
            database = next((d for d in self._inputs.databases if d.name == name or not name), None)
            if database is None:
                raise InvalidRequest(f"--effects names database {name!r}, which was not given with --database")
            self._add("DUP_EFFECT", *searches.doubled(self._spark, database, query, coverage.between))
        for kafka in self._inputs.kafka:
            self._add("CORRUPT", [c for c in kafka_searches.corrupt(self._spark, kafka) if coverage.holds(c.at_us)])
            self._add_gaps(coverage, kafka.name, kafka.bridges)
            self._progress("checking the order")
            self._add("DISORDER", *kafka_searches.disorder(self._spark, kafka, self._inputs.databases, coverage.span))
            self._add_dead(dead.of_kafka(self._spark, kafka, coverage.from_us, coverage.to_us))
            self._note_unjudged(kafka)
        if not self._inbox_groups:
            result.not_checked["ACKED_NO_EFFECT"] = "no database given has inbox rows"

    def _search_malformed(self, coverage: Coverage) -> None:
        span = coverage.span and Span(coverage.from_us, coverage.to_us)
        for database in self._inputs.databases:
            count, cases = malformed(database, span)
            self._add("MALFORMED", cases, count)

    def _add_dead(self, letters: Dead) -> None:
        self._add("DEAD", letters.cases, letters.count)
        self.result.dead += letters.by_reason

    def _add_gaps(self, coverage: Coverage, name: str, bridges: Sequence[Bridged]) -> None:
        self._add("BRIDGE_GAP", [g for g in searches.gaps(name, bridges) if coverage.holds(g.at_us)])

    def _note_unjudged(self, kafka: KafkaInput) -> None:
        """Say for which groups over Kafka nothing shows which messages they take."""
        result, known = self.result, kafka.progress
        silent = sorted(set(kafka.groups()) - known.noted)
        if silent and not self._inputs.logs and not known.noted & set(kafka.groups()):
            reason = "no consumer group has noted its subscriptions in Kafka (consumers of this version do)"
            result.not_checked["DISORDER"] = result.not_checked["ACKED_NO_EFFECT"] = reason
        elif silent:
            result.notes.append(
                "not checked for ACKED_NO_EFFECT and DISORDER, because they have not noted their subscriptions in "
                f"Kafka: {', '.join(silent[:20])}"
            )
        if known.filtered:
            named = ", ".join(sorted(known.filtered)[:20])
            result.notes.append(f"not checked for ACKED_NO_EFFECT, because their subscriptions have filters: {named}")

    def _add(self, name: str, cases: list[Found], count: int | None = None) -> None:
        """`count`: how many there are, if not all are in `cases`."""
        self.result.counts[name] = self.result.counts.get(name, 0) + (len(cases) if count is None else count)
        self.result.found += cases
