"""One audit: it reads every input, joins each message's rows, classifies the contradictions, and gives a verdict.

It reads the downstream inputs first: the log before the databases. The databases therefore have a row for every message
in the log. A row that a database committed after the log's watermark is PENDING, not LOST.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add, or_
from pathlib import Path
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from notify.errors import InvalidRequest
from notify.spark.checks import dead_letters, kafka_searches, left_out, searches
from notify.spark.checks.dead_letters import Dead
from notify.spark.checks.malformed import malformed
from notify.spark.checks.rows_outside_range import strays
from notify.spark.digest.comparison import figures_of, latencies_of
from notify.spark.digest.look import MOST_SHARE, FirstLook, Looked
from notify.spark.digest.slots import SLOT_SECONDS
from notify.spark.inputs.catalog import Bridged
from notify.spark.inputs.effects import BusinessEffects, business_effects
from notify.spark.inputs.identities import identities_of
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import EVERYTHING
from notify.spark.inputs.shards import movers_of
from notify.spark.judge import findings, measures
from notify.spark.judge.cases import Cases
from notify.spark.judge.completeness import completeness_of
from notify.spark.judge.completeness_proof import Proof, refuse_doubled, refuse_foreign
from notify.spark.judge.coverage import Coverage, cover
from notify.spark.judge.deadlines import InTime, choosing, filtered, joined_us
from notify.spark.judge.findings import BAD
from notify.spark.judge.grain import MOST_BUCKETS, Grain, grain_of
from notify.spark.judge.message_rows import MASKS, PROVEN, Groups
from notify.spark.judge.rows import MessageRows, hashes, producer_groups
from notify.spark.judge.second_look import look_again
from notify.spark.judge.terms import SKEW_US
from notify.spark.judge.verdict import judge
from notify.spark.result import LATENCIES, Covered, Found, Inputs, Plan, Result
from notify.spark.tasks import cores_of

_BYPASS = "spark.sql.execution.bypassPartialAggregation"
ROWS_A_PARTITION = 300_000
REREAD_BYTES = 256 << 20
"""How many bytes of the logs each window of a watch, and an audit that continues another one, compare with their copies
again; any other audit compares all bytes."""
MOST_PARTITIONS = 2000
DIGESTED_MESSAGES = 300_000
"""From this many messages on, it is faster to compare digests first than to read everything."""
FEW_SLOTS = 8
"""A range of fewer slots is read without a digest."""


class Audit:
    """Runs a plan. `progress` is called with the name of each step."""

    def __init__(
        self,
        spark: SparkSession,
        plan: Plan,
        inputs: Inputs,
        scratch: Path | str,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        plan.check()
        if not inputs.databases:
            raise InvalidRequest("an audit needs a --database: all other inputs are compared with what it committed")
        if not (inputs.logs or inputs.kafka):
            raise InvalidRequest("an audit needs a --log or a --kafka, which the messages were written to")
        names = [database.name for database in inputs.databases]
        if len(set(names)) < len(names):
            raise InvalidRequest("two databases have the same name: give them as --database NAME=URL")
        self._spark = spark
        self._plan = plan
        self._inputs = inputs
        self._scratch = scratch
        self._progress = progress
        self.result = Result(bad=(*BAD, *plan.fail_on))
        self._effects: list[BusinessEffects] = []
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

    def begin(self) -> Coverage | None:
        """Prepare the inputs, and note in the result what they lack. Spark only helps to copy large logs.

        Returns what can be judged; None if a database hides rows, which would be LOST or GHOST, or hide others. Raises
        as `run`.
        """
        result = self.result
        for database in (*self._inputs.databases, *self._inputs.storages):
            result.reasons += database.hidden
        if not result.reasons:
            self._effects = business_effects(self._inputs.databases, self._plan.effects)
            result.reasons += [why for query in self._effects for why in query.hidden]
        if result.reasons:
            return None
        result.identities = identities_of(self._inputs)
        self._prepare()
        self._step("copy the log")
        return cover(self._plan, self._inputs, self._inbox_groups, result)

    def _run(self) -> Result:
        started = self._mark = time.monotonic()
        result = self.result
        coverage = self.begin()
        if coverage is None:
            result.totals = dict.fromkeys(measures.TOTALS, 0)
            result.seconds = round(time.monotonic() - started, 2)
            return result
        looked = self._look(coverage)
        coverage = replace(coverage, drill=looked.drill)
        self._configure(coverage)
        self._progress("reading the databases")
        with_rows = looked.with_rows
        if with_rows is None:
            with_rows = producer_groups(self._inputs, self._plan.producer_groups, coverage.span)
        result.producer_groups = with_rows
        message_rows = MessageRows(self._spark, self._inputs, self._groups, coverage, with_rows, self._effects)
        if message_rows.uncovered:
            listed = ", ".join(message_rows.uncovered[:20])
            result.notes.append(
                f"not checked for GHOST, because no given database has rows of these producer groups: {listed}"
            )
        self._judge(message_rows, coverage, looked)
        if not self._plan.closes_by_clock:  # a watch shows no latencies
            self._count_acks(coverage, looked)
        self._search(coverage)
        self._search_malformed(coverage, looked)
        left_out.tell(self._spark, self._inputs, result, self._effects)
        dead_letters.tell(self._inputs, result, self._effects)
        self._step("order, damage, gaps, effects")
        judge(self._plan, result, max((bucket["newest_row_us"] or 0 for bucket in result.buckets), default=0))
        result.completeness = completeness_of(
            result.buckets, self._plan.deliver_seconds, self._plan.objective, has_inbox=bool(self._inbox_groups)
        )
        result.seconds = round(time.monotonic() - started, 2)
        return result

    def _look(self, coverage: Coverage) -> Looked:
        """Compare digests first if the plan asks for it or it is likely to save time."""
        if self._plan.method == "full" or (not self._plan.method and not self._is_large(coverage)):
            return Looked()
        self._progress("comparing digests")
        known = self._plan.producer_groups
        first = FirstLook(self._spark, self._inputs, self._groups, coverage, self._in_time(coverage), known)
        looked = first.look(self._plan.fail_on, 1.0 if self._plan.method else MOST_SHARE)
        if looked.problem:
            self.result.notes.append(f"everything was read, without a digest first: {looked.problem}")
        else:
            equal = len(looked.equal)
            read = looked.compared - equal
            self.result.slots = {"compared": looked.compared, "equal": equal, "read": read}
            self.result.coverage.append(
                Covered(
                    "all inputs", "digests", f"{looked.compared} slots of {SLOT_SECONDS:.0f} s",
                    f"all of them; {equal} are equal, and {read} were read row by row", is_whole=True,
                )
            )  # fmt: skip
        self._step("digest")
        return looked

    def _is_large(self, coverage: Coverage) -> bool:
        """Whether the inputs are so large that it saves time to compare digests first."""
        plan = self._plan
        if plan.from_us and plan.to_us and plan.to_us - plan.from_us < FEW_SLOTS * SLOT_SECONDS * 1e6:
            return False  # the slots at both ends are always read row by row
        return sum(log.count_from(coverage.span) for log in self._inputs.logs) >= DIGESTED_MESSAGES

    def _configure(self, coverage: Coverage) -> None:
        partitions = self._partitions(coverage)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        # Adaptive planning after each stage pays off for long stages; it triples the jobs of a small audit.
        is_large = partitions > cores_of(self._spark)
        self._spark.conf.set("spark.sql.adaptive.enabled", str(is_large).lower())

    def _judge(self, message_rows: MessageRows, coverage: Coverage, looked: Looked) -> None:
        """Compute the figures and cases of all messages: those that were read row by row, and those of equal slots."""
        result = self.result
        result.bucket_us = self._plan.bucket_us
        topics = {value: name for name, value in hashes(self._spark, sorted(self._topic_names())).items()}
        result.latencies = {kind: [] for kind in LATENCIES}
        result.latencies["queue_to_ack"] = latencies_of(looked.equal, self._plan.bucket_us)
        if looked.is_whole:
            self._count([], coverage, looked)
            return
        # A partition rarely holds two rows of a message, so that an aggregation before the shuffle only costs time.
        self._spark.conf.set(_BYPASS, "true")
        rows = message_rows.read().persist(StorageLevel.MEMORY_AND_DISK)
        self._spark.conf.set(_BYPASS, "false")
        try:
            grain, in_time = self._grain(rows, topics, coverage), self._in_time(coverage)
            result.bucket_us = grain.bucket_us
            judged, counted = rows, measures.count(rows, grain, self._groups, in_time)
            lost = rows if any(bucket["LOST"] for bucket in counted) else None
            afterwards = look_again(self._spark, self._plan, self._inputs, coverage, result, lost)
            if afterwards.is_new:
                in_time = replace(in_time, inbox_from_us=max(in_time.inbox_from_us, afterwards.inbox_from_us))
                judged = afterwards.judged(rows)
                counted = measures.count(judged, grain, self._groups, in_time)
            self._count(counted, coverage, looked)
            self._step("join")
            self._collect(judged, message_rows, topics, coverage)
            for kind, histogram in measures.latencies(rows, grain).items():
                result.latencies[kind] = measures.added(result.latencies[kind], histogram)
            self._step("latencies")
        finally:
            rows.unpersist()

    def _count_acks(self, coverage: Coverage, looked: Looked) -> None:
        if looked.is_whole or looked.drill is not None:  # counting would read all that the digests save
            self.result.notes.append("commit_to_ack was not counted: an audit with --full counts it")
            return
        for log in self._inputs.logs:
            for group, counts in measures.commit_to_ack(self._spark, log, coverage.from_us, coverage.to_us).items():
                known = self.result.commit_to_ack.get(group, [0] * len(counts))
                self.result.commit_to_ack[group] = [*map(add, known, counts)]
        self._step("acknowledgements")

    def _count(self, read: list[dict[str, Any]], coverage: Coverage, looked: Looked) -> None:
        """Add up the figures of the messages that were read row by row (`read`) and those of equal slots."""
        result, blocks = self.result, range(self._groups.blocks)
        done = [reduce(or_, (bucket.pop(f"done{block}") or 0 for bucket in read), 0) for block in blocks]
        acknowledged = {group for slot in looked.equal for group in slot.acked} & set(self._groups.names)
        result.buckets = measures.together(read, figures_of(looked.equal, self._plan.bucket_us))
        Proof(self._inputs, result, coverage.from_us, coverage.to_us).of_inboxes(
            acknowledged.union(self._groups.of(done))
        )
        for name in measures.TOTALS:
            result.totals[name] = sum(bucket[name] for bucket in result.buckets)
        result.counts = {f.name: sum(bucket.get(f.name, 0) for bucket in result.buckets) for f in findings.FINDINGS}

    def _collect(self, rows: DataFrame, message_rows: MessageRows, topics: dict[int, str], coverage: Coverage) -> None:
        """Collect the cases of the rows, and remove cases that were repaired or turned out not to be findings."""
        result = self.result
        self._progress("collecting findings")
        cases = Cases(
            self._spark, self._inputs, self._groups,
            inbox_groups=self._inbox_groups, topics=topics, producer_groups=message_rows.producer_groups,
            from_us=coverage.span.start_us if coverage.span else 0,
        )  # fmt: skip
        result.found += cases.collect(rows, result.counts)
        for case in cases.came_later(result.found):
            result.found.remove(case)
            result.counts[case.finding] -= 1
        if self._plan.from_us or self._plan.to_us:
            before, result.found = result.found, cases.put_right(result.found)
            changed = sum(old.finding != new.finding for old, new in zip(before, result.found, strict=True))
            result.counts["ACKED_NO_EFFECT"] -= changed
            result.counts["MISDATED"] += changed
        repaired = cases.mark_repaired(result.found)
        for name, number in repaired.items():
            result.counts[name] -= number
        if repaired:
            result.totals["repaired"] = repaired.total()
        self._step("findings")

    def _in_time(self, coverage: Coverage) -> InTime:
        terms, deliver_us = coverage.terms, round(self._plan.deliver_seconds * 1e6)
        joined = joined_us(self._inputs.logs)
        return InTime(
            terms.settled_before_us, deliver_us, joined, terms.inbox_from_us, self._inbox_groups,
            filtered(self._inputs), terms.inbox_until_us, choosing(self._inputs),
        )  # fmt: skip

    def _grain(self, rows: DataFrame, topics: Mapping[int, str], coverage: Coverage) -> Grain:
        bucket_us = self._plan.bucket_us
        if self._messages(coverage) <= MOST_BUCKETS:
            return Grain(bucket_us, topics)
        grain = grain_of(rows, bucket_us, topics)
        if not grain.is_whole:
            self.result.notes.append(
                f"figures over time are counted for every {grain.bucket_us / 1e6:,.0f} seconds and for the "
                f"{len(grain.topics)} largest topics, because more than {MOST_BUCKETS:,} would not fit"
            )
        return grain

    def _topic_names(self) -> set[str]:
        names = {name for log in self._inputs.logs for name in log.catalog.topics.values()}
        return names | {topic for kafka in self._inputs.kafka for topic in kafka.topics}

    # --- inputs -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        refuse_doubled(self._inputs)
        sources = {source for database in self._inputs.databases if (source := database.source_id())}
        if sources:
            sources |= movers_of(self._inputs).keys()
        for log in self._inputs.logs:
            self._progress(f"reading log {log.name}: {len(log.segments)} segments")
            is_part = self._plan.closes_by_clock or self._plan.continues
            log.prepare(self._spark, self._scratch, REREAD_BYTES if is_part else EVERYTHING, sources)
            self.result.reasons += [f"log {log.name}: {problem}" for problem in log.problems]
        refuse_foreign(self._inputs)
        # Twice the slack: once for the times of ids, and once for the times of the records.
        slack_us = 2 * (SKEW_US + round(max(self._plan.max_transaction_seconds, self._plan.deliver_seconds) * 1e6))
        for kafka in self._inputs.kafka:
            self._progress(f"asking Kafka at {kafka.brokers}")
            kafka.prepare(max(0, self._plan.from_us - slack_us), self._plan.to_us + slack_us if self._plan.to_us else 0)
            self.result.reasons += kafka.hidden
        names: list[str] = []
        for log in self._inputs.logs:
            names += log.groups()
        for kafka in self._inputs.kafka:
            names += kafka.groups()
            names += sorted({left.group for several in kafka.left.values() for left in several})
        self._inbox_groups = frozenset(g for d in self._inputs.databases for g in d.inbox_groups() if "@" not in g)
        for kafka in self._inputs.kafka:
            self.result.reasons += kafka.passed(self._inbox_groups)
        # An instance of a broadcast (`group@instance`) says nothing about its group.
        masks = (*MASKS, PROVEN) if self._effects else MASKS
        self._groups = Groups([n for n in (*names, *sorted(self._inbox_groups)) if "@" not in n], masks)

    def _partitions(self, coverage: Coverage) -> int:
        """The number of shuffle partitions: each fits in memory, and a small audit starts no hundred empty tasks."""
        messages = self._messages(coverage)
        cores = cores_of(self._spark)
        return max(min(cores, 1 + messages // 10_000), min(MOST_PARTITIONS, messages // ROWS_A_PARTITION))

    def _messages(self, coverage: Coverage) -> int:
        """About how many messages of the queues are read row by row."""
        if coverage.drill is None:
            messages = sum(log.count_from(coverage.span) for log in self._inputs.logs)
        else:
            messages = coverage.drill.messages
        return messages + sum(kafka.count for kafka in self._inputs.kafka)

    # --- searches over several messages -----------------------------------------------------------------------

    def _search(self, coverage: Coverage) -> None:
        """Look for findings that the row of one message cannot show."""
        result = self.result
        for log in self._inputs.logs:
            self._add("CORRUPT", *searches.corrupt(log, coverage.holds))
            self._add_gaps(coverage, log.name, log.catalog.bridges)
            apart = searches.misdated(self._spark, log, coverage.span, coverage.between, coverage.terms.slack_us)
            self._add("MISDATED", *apart)
            self._progress("checking the order")
            self._add("DISORDER", *searches.disorder(self._spark, log, coverage.span))
            self._add_dead(dead_letters.of_log(self._spark, log, coverage.from_us, coverage.to_us))
            self._add("LEFT_OUT", *left_out.expired(self._spark, log, coverage.between))
        if not self._plan.effects:
            result.not_checked["DUP_EFFECT"] = "name the business effects with --effects"
        for effects in self._effects:
            self._add("DUP_EFFECT", *searches.doubled(self._spark, effects, coverage.between))
            result.notes += effects.doubts(self._groups.names)
        for kafka in self._inputs.kafka:
            self._add("CORRUPT", [c for c in kafka_searches.corrupt(self._spark, kafka) if coverage.holds(c.at_us)])
            self._add_gaps(coverage, kafka.name, kafka.bridges)
            self._progress("checking the order")
            self._add("DISORDER", *kafka_searches.disorder(self._spark, kafka, self._inputs.databases, coverage.span))
            self._add_dead(dead_letters.of_kafka(self._spark, kafka, coverage.from_us, coverage.to_us))
            self._note_unjudged(kafka)
        if not self._inbox_groups:
            result.not_checked["ACKED_NO_EFFECT"] = "no database given has inbox rows"

    def _search_malformed(self, coverage: Coverage, looked: Looked) -> None:
        """Look for malformed rows, and for strays if the plan asks for them.

        Digests compare the texts of all ids, except those outside of every range.
        """
        span = coverage.between
        for database in self._inputs.databases if self._plan.with_strays else ():
            self._add("MISDATED", strays(database, coverage.from_us, coverage.terms.slack_us))
        if span is None and looked.is_whole:
            return
        for database in self._inputs.databases:
            count, cases = malformed(database, span, coverage.drill if span is None else None)
            self._add("MALFORMED", cases, count)

    def _add_dead(self, letters: Dead) -> None:
        self._add("DEAD", letters.cases, letters.count)
        self._add("LEFT_OUT", letters.left_out, letters.left_out_count)
        self.result.dead += letters.by_reason

    def _add_gaps(self, coverage: Coverage, name: str, bridges: Sequence[Bridged]) -> None:
        self._add("BRIDGE_GAP", [g for g in searches.gaps(name, bridges) if coverage.holds(g.at_us)])

    def _note_unjudged(self, kafka: KafkaInput) -> None:
        """Note which groups over Kafka have not recorded which messages they take."""
        result, progress = self.result, kafka.progress
        lost = {case.topic for case in result.found if case.finding == "LOST" and case.topic}
        result.reasons += [why for why in kafka.hides(lost) if why not in result.reasons]
        silent = sorted(set(kafka.groups()) - progress.noted)
        if silent and not self._inputs.logs and not progress.noted & set(kafka.groups()):
            reason = "no consumer group has noted its subscriptions in Kafka (consumers of this version do)"
            result.not_checked["DISORDER"] = result.not_checked["ACKED_NO_EFFECT"] = reason
        elif silent:
            result.notes.append(
                "not checked for ACKED_NO_EFFECT and DISORDER, because they have not noted their subscriptions in "
                f"Kafka: {', '.join(silent[:20])}"
            )
        gone = {
            f"{group} of {place.topic}"
            for group, place in progress.subscribed
            if place.topic in kafka.topics and place not in progress.progress.get(group, {}) and "@" not in group
        }
        if gone:
            result.notes.append(
                "Kafka no longer has the offsets of some groups; LEFT_OUT does not count what they did not settle: "
                f"the offsets were deleted or expired: {', '.join(sorted(gone)[:20])}"
            )
        if progress.filtered:
            named = ", ".join(sorted(progress.filtered)[:20])
            result.notes.append(f"not checked for ACKED_NO_EFFECT, because their subscriptions have filters: {named}")

    def _add(self, name: str, cases: list[Found], count: int | None = None) -> None:
        """Add cases of the class `name`. `count`: the number of all cases, if `cases` is only a part."""
        self.result.counts[name] = self.result.counts.get(name, 0) + (len(cases) if count is None else count)
        self.result.found += cases
