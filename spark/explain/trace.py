"""A trace of one message: all that the inputs know of it, without a judgement."""

from __future__ import annotations

from dataclasses import dataclass, field

from notify.spark.checks.outbox_waiting import MOVED
from notify.spark.inputs.changes import Left


@dataclass(frozen=True)
class Row:
    """A local row. `state`: COMMITTED, ROLLED_BACK, or what no version writes."""

    database: str
    source: str
    state: str
    topic: str | None
    digest: int | None
    at_us: int
    producer_group: str
    unmoved: int = MOVED
    """See spark.checks.outbox_waiting."""
    is_dated: bool = True
    """Whether its created_at is a time; otherwise `at_us` is that of the id."""
    shards: str = ""
    """The shards that have the half, as the row names them."""
    has_capitals: bool = False
    """Whether the letters of its id are capital ones, which no version of the SDK writes."""


@dataclass(frozen=True)
class Stand:
    """A place of the message in a queue."""

    source: str
    """The input: `log data`."""
    topic: str
    queue: int
    offset: int
    queued_us: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue}@{self.offset}"


@dataclass(frozen=True)
class Settled:
    """How a group finished a message: ACK, FILTERED, DEAD_LETTER, …, or DONE if that is not known;
    and when, in microseconds since 1970 (0: not known)."""

    kind: str
    at_us: int


@dataclass
class Trace:
    """One message. Instants are in microseconds since 1970, by the sources' clocks; 0: it did not happen."""

    message_id: str
    rows: list[Row] = field(default_factory=list)
    half_us: int = 0
    source: int | None = None
    """Hash of the id of the half's database."""
    producer_group: str = ""
    digest: int | None = None
    """The digest of the contents, as the log has it."""
    outcomes: set[str] = field(default_factory=set)
    """COMMITTED, ROLLED_BACK: what servers recorded."""
    unmoved: int = MOVED
    """Whether a storage that has its half has sent it on (spark.checks.outbox_waiting)."""
    due_us: int = 0
    withdrawn: int = 0
    """WITHDRAWN, TAKES_NO_PLACE (spark.inputs.columns), or both."""
    stands: list[Stand] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    """The groups that are to receive it."""
    readers: set[str] | None = None
    """The groups that ever subscribed to its queue; None: not known."""
    inboxes_from: dict[str, int] = field(default_factory=dict)
    """When the inbox of a group begins, for its topic, if the log has it."""
    settled: dict[str, Settled] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    effects: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """The inbox rows by group: the database and when."""
    proven: set[str] = field(default_factory=set)
    """The groups in which --effects finds its effect."""
    left: dict[str, tuple[Left, Stand]] = field(default_factory=dict)
    """The change by which it left the queue of a group, and the place that it had there."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By what, by whom and why it left the queue of a group that never settled it."""
    passed: set[str] = field(default_factory=set)
    """The groups for which another program committed an offset after it."""
    letters: dict[str, list[Stand]] = field(default_factory=dict)
    """Its dead letters by group."""
    let_go: set[str] = field(default_factory=set)
    """The groups in which it took effect, and whose dead letters of it were dropped or purged."""

    @property
    def is_known(self) -> bool:
        return bool(self.rows or self.half_us or self.outcomes or self.stands or self.effects or self.letters)

    @property
    def at_us(self) -> int:
        """The time of its transaction."""
        first = [row.at_us for row in self.rows] or [self.half_us]
        if not first[0]:
            first = [stand.queued_us for stand in self.stands]
            first += [at_us for several in self.effects.values() for _, at_us in several]
        return min(first, default=0)

    @property
    def queued_us(self) -> int:
        return min((stand.queued_us for stand in self.stands), default=0)
