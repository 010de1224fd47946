"""The range that an audit covers: which transactions it may judge, and within which bounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame

from notify.spark.checks import searches
from notify.spark.checks.outbox_waiting import bridged_us, bridges_of
from notify.spark.digest.drill import Drill
from notify.spark.inputs.databases import Database
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.ranges import Span
from notify.spark.inputs.replicas import unseen_from
from notify.spark.inputs.shards import halves_from_us, ids_of
from notify.spark.judge.completeness_proof import Proof
from notify.spark.judge.terms import SKEW_US, Terms
from notify.spark.result import Covered, Inputs, Plan, Result
from notify.spark.times import instant_text

MOST_HOLES = 20
"""Up to this number, unreadable parts of logs are treated one by one."""


@dataclass(frozen=True)
class Coverage:
    """The range, and the bounds of the findings. Instants are in microseconds since 1970."""

    from_us: int
    to_us: int
    closed_us: int
    """Transactions before this can be judged: they cannot change any more."""
    terms: Terms
    """The bounds of the findings. Its `covered_groups` are still empty."""
    span: Span | None
    """The range of ids that transactions in the audited range can have; None: all ids."""
    has_start: bool
    """Whether the plan names the start of the range."""
    origins: Mapping[str, int | None]
    """The number of each database with local rows, by its source id. None: any number (see Proof.of_sources)."""
    lacks_storage: bool = False
    """Whether halves may be in a storage that was not given."""
    drill: Drill | None = None
    """The part of the range that is read row by row; None: the whole range."""

    @property
    def between(self) -> Span | None:
        """The audited range without slack; None: all ids."""
        return None if self.span is None else Span(self.from_us, self.to_us, self.span.ahead_us)

    def within(self, rows: DataFrame) -> DataFrame:
        """The rows whose ids are in the part of the range that is read row by row."""
        in_span = searches.within(rows, self.span)
        return in_span if self.drill is None else self.drill.within(in_span)

    @property
    def read_from_us(self) -> int:
        """A segment that was last written before this instant has no row that must be read."""
        start_us = self.span.start_us if self.span else 0
        if self.drill is None or not self.drill.ranges:
            return start_us
        return max(start_us, self.drill.ranges[0].start_us - self.terms.slack_us)

    def holds(self, at_us: int) -> bool:
        """Whether an instant lies in the range; True for 0, an instant that is not known."""
        return not at_us or self.from_us <= at_us < self.to_us or not self.has_start


def cover(plan: Plan, inputs: Inputs, inbox_groups: frozenset[str], result: Result) -> Coverage:
    """The range to audit. Notes each input, its watermark and its start in the result."""
    now_us = time.time_ns() // 1000
    longest_us = round(plan.max_transaction_seconds * 1e6)
    copies_us = [us for database in inputs.databases if (us := _note_database(database, result)) is not None]
    copies_us += [us for storage in inputs.storages if (us := _note_database(storage, result, "storage")) is not None]
    _note_queues(inputs, result)
    watermark_us = now_us if plan.closes_by_clock else min(_originals(result), default=now_us)
    deliver_us = round(plan.deliver_seconds * 1e6)
    bounds = terms_of(inputs, inbox_groups, copies_us, watermark_us, longest_us, deliver_us)
    with_rows = [database for database in inputs.databases if not database.is_without_rows]
    whole_from = max([bounds.log_from_us, *[database.purged()[0] for database in with_rows]])
    if plan.from_us and plan.from_us < whole_from:
        result.reasons.append(
            f"--from is before {instant_text(whole_from)}: older local rows were purged, or older segments deleted"
        )
    from_us, to_us = max(plan.from_us, whole_from), plan.to_us or now_us
    slack_us = bounds.slack_us
    for log in inputs.logs:
        result.reasons += [f"log {log.name}: {part}" for part in log.unread(from_us - slack_us)]
    proof = Proof(inputs, result, from_us, to_us, slack_us)
    proof.of_logs()
    origins = proof.of_sources()
    strangers = proof.strangers()
    lacks_storage = proof.of_storages()
    terms = replace(
        bounds,
        holes=_holes(inputs, now_us),
        strangers=strangers,
        whole_from_us=0 if plan.from_us or plan.to_us else from_us,
    )
    result.from_us, result.to_us, result.closed_us = from_us, to_us, min(to_us, terms.closed_before_us)
    # A message may be queued as long after its transaction began as the transaction may last.
    result.judged_us = min(result.closed_us, terms.settled_before_us - longest_us)
    _range(result, plan)
    span = _span(plan, from_us, to_us, terms.ahead_us)
    return Coverage(from_us, to_us, result.closed_us, terms, span, bool(plan.from_us), origins, lacks_storage)


def terms_of(
    inputs: Inputs,
    inbox_groups: frozenset[str],
    copies_us: Sequence[int],
    watermark_us: int,
    longest_us: int,
    deliver_us: int,
) -> Terms:
    """The bounds by which messages of these inputs are judged, without holes and strangers. Times in microseconds.

    `copies_us`: until when each database that follows another one has its commits. `watermark_us`: until when the
    inputs are complete. `longest_us`, `deliver_us`: how long a transaction, and a delivery, may take.
    """
    purged = [database.purged() for database in inputs.databases]
    queues: list[LogInput | KafkaInput] = [*inputs.logs, *inputs.kafka]
    skew_us = max((abs(database.clock_offset_us) for database in inputs.databases), default=0)
    # This holds for a watch, too: a message that was not shipped yet is not lost.
    settled_until_us = min([watermark_us, *[log.watermark_us for log in inputs.logs if log.is_shipped]])
    bridges = bridges_of(inputs.logs, inputs.kafka)
    bridged = [(number, bridged_us(ids_of(database), bridges)) for number, database in enumerate(inputs.databases)]
    slack_us = SKEW_US + longest_us
    return Terms(
        # This holds for a watch, too: a row that a copy lacks proves nothing.
        closed_before_us=min([settled_until_us, *copies_us]) - longest_us - skew_us,
        settled_before_us=settled_until_us - deliver_us,
        covered_groups=frozenset(),
        inbox_groups=inbox_groups,
        rows_from_us=max((rows for rows, _ in purged), default=0),
        inbox_from_us=max((inbox for _, inbox in purged), default=0),
        inbox_until_us=unseen_from(copies_us, max((each.watermark_us for each in queues), default=0), skew_us),
        log_from_us=max((each.first_us for each in queues), default=0),
        halves_from_us=halves_from_us(inputs.storages),
        slack_us=slack_us,
        bridged_us=tuple((number, at_us) for number, at_us in bridged if at_us),
        lost=tuple((restore.known_us, restore.restored_us) for log in inputs.logs for restore in log.catalog.restores),
        ahead_us=time.time_ns() // 1000 + slack_us,
    )


def _originals(result: Result) -> list[int]:
    """The watermarks of inputs that are neither copies nor shipped logs."""
    return [entry["watermark_us"] for entry in result.inputs if not (entry.get("is_copy") or entry.get("is_shipped"))]


def _range(result: Result, plan: Plan) -> None:
    """Note the requested times and the times that can be judged."""
    requested = f"{instant_text(plan.from_us) if plan.from_us else 'the oldest data'} to " + (
        instant_text(plan.to_us) if plan.to_us else "now"
    )
    judged = (
        f"{instant_text(result.from_us) if result.from_us else 'the oldest data'} to {instant_text(result.closed_us)}"
    )
    result.coverage.append(
        Covered("all inputs", "range", requested, judged, not plan.from_us or plan.from_us >= result.from_us)
    )


def _holes(inputs: Inputs, now_us: int) -> tuple[tuple[int, int], ...]:
    """The times of the unreadable parts of logs; one time that contains all parts if there are many."""
    holes = sorted((hole.from_us, hole.to_us or now_us) for log in inputs.logs for hole in log.holes)
    if len(holes) > MOST_HOLES:
        holes = [(holes[0][0], max(end for _, end in holes))]
    return tuple(holes)


def _note_database(database: Database, result: Result, kind: str = "database") -> int | None:
    """Note a database or storage in the result.

    If it is a copy, returns the instant until which it has all commits of its primary; otherwise None.
    """
    name, now_us = f"{kind} {database.name}", database.now_us
    rows_from_us = database.purged()[0] if kind == "database" else 0
    if kind == "database" and database.is_unmarked:
        result.reasons.append(
            f"{name}: nothing says which rows of its inbox were purged, because it has no row of notify_source that "
            "this user may see: grant SELECT on notify_source, or run create_tables if the table is gone"
        )
    if kind == "database" and database.is_without_rows:
        rows_from_us = 0
        result.reasons.append(
            f"{name}: it has producers with rows=False, whose messages stand in its log only, so that no row tells "
            "which messages should be in the queues"
        )
    clock = f"clock {database.clock_offset_us / 1e6:+.3f} s"
    replica = database.replica()
    if replica is None:
        _note(result, name, database.kind, now_us, rows_from_us, clock)
        return None
    until = f"until {instant_text(replica.until_us)}" if replica.until_us else f"is not known: {replica.why}"
    if not replica.until_us:
        result.reasons.append(
            f"{name} follows another one, and how current it is, {until}. Name the primary with --{kind}"
        )
    expected = "all that its primary committed"
    result.coverage.append(Covered(name, "copy", expected, until, is_whole=bool(replica.until_us)))
    _note(result, name, database.kind, min(now_us, replica.until_us), rows_from_us, f"{clock}; a copy of its primary")
    result.inputs[-1]["is_copy"] = True
    return replica.until_us


def _note_queues(inputs: Inputs, result: Result) -> None:
    """Note the logs and Kafka in the result."""
    for log in inputs.logs:
        state = "a server has it open" if log.is_served else "no server has it open"
        state = "as it was shipped" if log.is_shipped else state
        detail = f"{len(log.facts)} segments, {sum(facts.messages for facts in log.facts)} messages; {state}"
        _note(result, f"log {log.name}", "log", log.watermark_us, log.first_us, detail)
        result.inputs[-1]["is_shipped"] = log.is_shipped
    for kafka in inputs.kafka:
        topics = f"{len(kafka.topics)} topics"
        _note(result, kafka.name, "kafka", kafka.watermark_us, kafka.first_us, topics)


def _note(result: Result, name: str, kind: str, watermark_us: int, from_us: int, detail: str) -> None:
    result.inputs.append(
        {"input": name, "kind": kind, "watermark_us": watermark_us, "from_us": from_us, "detail": detail}
    )


def _span(plan: Plan, from_us: int, to_us: int, ahead_us: int) -> Span | None:
    if not plan.from_us and not plan.to_us:
        return None
    slack_us = SKEW_US + round(plan.max_transaction_seconds * 1e6)
    return Span(max(0, from_us - slack_us), to_us + slack_us if plan.to_us else 1 << 52, ahead_us)
