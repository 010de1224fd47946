"""The plan, the inputs and the result of an audit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.latency import BUCKETS, shown
from notify.spark.causes.cause import Cause
from notify.spark.inputs.changes import Left
from notify.spark.inputs.databases import Database
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.log_read import LogRead
from notify.spark.judge.completeness import Completeness
from notify.spark.judge.findings import BAD, BY_NAME

LATENCIES = ("row_to_queue", "queue_to_ack", "queue_to_effect")
"""The kinds of latency that are counted by topic: from a message's local row until it is recorded in a queue, and from
then until its last acknowledgement and until its first effect."""
MOST_LISTED = 200
"""The most topics, and the most groups, that a report lists."""


@dataclass(frozen=True)
class Plan:
    """How to audit. The range is in microseconds since 1970; `from_us` 0: the oldest data; `to_us` 0: now."""

    from_us: int = 0
    to_us: int = 0
    max_transaction_seconds: float = 600.0
    deliver_seconds: float = 600.0
    """The time within which a message in a queue should be settled."""
    bucket_seconds: float = 60.0
    effects: tuple[tuple[str, str], ...] = ()
    """Pairs of a database name and a query for business effects, see Database.doubled."""
    fail_on: tuple[str, ...] = ()
    """Classes that fail the audit in addition to those that always do."""
    objective: float = 99.99
    """The share of committed messages, in percent, that should be delivered and take effect in `deliver_seconds`."""
    method: str = ""
    """How to read: `digest`: compare digests, then read the slots that differ; `full`: read everything; "": the faster
    of the two."""
    with_strays: bool = False
    """Whether to look also for local rows written since `from_us` whose ids lie before it, see
    spark.checks.rows_outside_range."""
    closes_by_clock: bool = False
    """Whether to close transactions by this machine's clock, as `watch` does, so that a stalled input cannot hide lost
    messages."""
    continues: bool = False
    """Whether earlier audits read everything before `from_us` (spark.judge.continue_from)."""
    producer_groups: tuple[str, ...] = ()
    """The producer groups that are known to have local rows; empty: the audit asks each table."""

    @property
    def bucket_us(self) -> int:
        """The length of a bucket of figures over time, in microseconds."""
        return round(self.bucket_seconds * 1e6)

    def check(self) -> None:
        """Raises InvalidRequest if the range is empty or a class of `fail_on` does not exist."""
        if self.to_us and self.from_us >= self.to_us:
            raise InvalidRequest("--from must be before --to")
        if unknown := set(self.fail_on) - BY_NAME.keys():
            raise InvalidRequest(
                f"--fail-on: there is no class {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}"
            )


@dataclass(frozen=True)
class Inputs:
    """The inputs of an audit."""

    databases: Sequence[Database] = ()
    logs: Sequence[LogInput] = ()
    kafka: Sequence[KafkaInput] = ()
    storages: Sequence[Database] = ()
    records: Sequence[str] = ()
    """Places of further records of administrators' writes, see spark.actions."""


@dataclass
class Found:
    """One finding, with its evidence."""

    finding: str
    transaction_id: str = ""
    message_no: int = 0
    detail: str = ""
    topic: str = ""
    queue: int | None = None
    offset: int | None = None
    producer_group: str = ""
    groups: list[str] = field(default_factory=list)
    at_us: int = 0
    database: str = ""
    log: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    """LEFT_OUT: for each of its groups, what the message left its queue by."""
    of_groups: tuple[str, ...] = ()
    """LEFT_OUT: for each of its groups, the part of the detail that is of it alone."""

    @property
    def message_id(self) -> str:
        return f"{self.transaction_id}.{self.message_no}" if self.transaction_id else ""

    @property
    def key(self) -> str:
        """A key of this finding that stays the same in every audit."""
        subject = self.message_id or f"{self.log}:{self.evidence.get('position', '')}:{self.detail}"
        return f"{self.finding}:{subject}:{','.join(self.groups)}"

    def words(self) -> dict[str, Any]:
        """The evidence without instants and empty values."""
        return {k: v for k, v in self.evidence.items() if not k.endswith("_us") and v not in ("", None)}


@dataclass(frozen=True)
class Covered:
    """One input that an audit expected, and how much of it was read."""

    name: str
    """The name of the input or group."""
    kind: str
    """segments, partitions, source, shard, storage, copy, inbox, digests or range."""
    expected: str
    read: str
    is_whole: bool


@dataclass
class Result:
    """The result of an audit."""

    verdict: str = "INCONCLUSIVE"
    """PASS, FINDINGS or INCONCLUSIVE."""
    reasons: list[str] = field(default_factory=list)
    """The reasons why the audit is inconclusive."""
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    not_checked: dict[str, str] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    buckets: list[dict[str, Any]] = field(default_factory=list)
    latencies: dict[str, list[tuple[int, str, int, int]]] = field(default_factory=dict)
    """Rows of (instant, topic, bucket, messages) by kind; the buckets are those of notify/protocol/latency.py."""
    commit_to_ack: dict[str, list[int]] = field(default_factory=dict)
    """The acknowledgements of each consumer group by bucket, counted as a server counts its histogram of that name."""
    bucket_us: int = 0
    """The length of each of the `buckets`: the plan's, or a longer one if there would be too many of them."""
    from_us: int = 0
    to_us: int = 0
    closed_us: int = 0
    judged_us: int = 0
    """Transactions before this were judged, including the delivery of their messages."""
    judges_all_us: int = 0
    """When an audit can judge all messages that are PENDING only because they are new; 0: none is, or waiting is
    useless."""
    producer_groups: set[str] = field(default_factory=set)
    """The producer groups with local rows."""
    seconds: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    coverage: list[Covered] = field(default_factory=list)
    """The table that says what the audit expected and what it read."""
    dead: list[dict[str, Any]] = field(default_factory=list)
    """Dead letters that were not redriven: group, reason and count, the most frequent first."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Messages that left queues unsettled, by group, topic and cause: how, when, who did it and why, and how many."""
    causes: list[Cause] = field(default_factory=list)
    """The findings by cause; the cause to act on first comes first."""
    causes_left: int = 0
    """How many causes are not listed in `causes`."""
    completeness: Completeness | None = None
    """The share of messages that were delivered and took effect in time."""
    slots: dict[str, int] = field(default_factory=dict)
    """How many slots of time were `compared` by digests, were `equal`, and were `read`; empty without digests."""
    logs: list[LogRead] = field(default_factory=list)
    """How far each log was read, for a watch."""
    identities: dict[str, str] = field(default_factory=dict)
    """The inputs by what stays the same about each, with their names, for a watch."""
    bad: tuple[str, ...] = tuple(BAD)
    """The classes of findings that fail this audit."""

    def by_topic(self, kind: str) -> dict[str, list[int]]:
        """The messages of each topic by bucket of a kind of latency."""
        counts: dict[str, list[int]] = defaultdict(lambda: [0] * BUCKETS)
        for _, topic, bucket, count in self.latencies.get(kind, ()):
            counts[topic][bucket] += count
        return counts

    @staticmethod
    def largest(counts: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
        """The MOST_LISTED topics or groups that have counted most, the largest first."""
        return sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0]))[:MOST_LISTED]

    @property
    def latency(self) -> dict[str, dict[str, Any]]:
        """How long messages took, by kind, and by topic (LATENCIES) or consumer group (`commit_to_ack`): as admin
        routes show it."""
        counts = {kind: self.by_topic(kind) for kind in LATENCIES} | {"commit_to_ack": self.commit_to_ack}
        return {kind: {name: shown(c) for name, c in self.largest(by_name)} for kind, by_name in counts.items()}

    @property
    def exit_code(self) -> int:
        """1 if the audit fails because of findings, otherwise 2 if it is inconclusive, otherwise 0."""
        if self.has_findings:
            return 1
        return 2 if self.reasons else 0

    @property
    def has_findings(self) -> bool:
        return any(self.counts.get(name) for name in self.bad)
