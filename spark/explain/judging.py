"""A verdict on one message, by the same rules as an audit's (spark.findings), and in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from notify.protocol import ids
from notify.spark.checks.outbox_waiting import DROPPED, MOVED, WAITS, WHY
from notify.spark.explain.trace import Trace
from notify.spark.inputs.catalog import Restore
from notify.spark.inputs.columns import name_hash
from notify.spark.judge.findings import BAD
from notify.spark.times import instant_text

INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Terms:
    """The bounds that a trace is judged by. Instants are in microseconds since 1970."""

    closed_before_us: int
    """Transactions before this are closed."""
    settled_before_us: int
    """Messages queued before this should be settled."""
    rows_from_us: int
    """Local rows from before this may have been purged."""
    inbox_from_us: int
    inbox_until_us: int
    """Inbox rows from this instant on may not have come to a copy of their database yet; 0: all have."""
    log_from_us: int
    """Older parts of the logs may have been deleted."""
    halves_from_us: int
    """Older halves may have been deleted from their storage."""
    sources: frozenset[int]
    """Hashes of the ids of the given databases."""
    producer_groups: frozenset[str]
    """Those with local rows in a given database."""
    inbox_groups: frozenset[str]
    slack_us: int
    """The most that the time of a row may differ from that in its id."""
    restores: tuple[Restore, ...] = ()
    """Restores of logs that had lost their disks."""
    bridged_us: Mapping[str, int] = field(default_factory=dict)
    """When the bridge of a source last moved on."""
    doubts: tuple[str, ...] = ()
    """Why the logs prove nothing by what they lack."""
    absent: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Why nothing is known of a shard whose log was not given, by its database and name."""
    unseen: tuple[str, ...] = ()
    """Why databases prove nothing by what they lack."""


@dataclass(frozen=True)
class Verdict:
    """`finding`: the class, "" if nothing is wrong. `others`: further classes that apply."""

    message_id: str
    finding: str
    sentence: str
    others: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether something could not be seen that may prove the opposite."""
        return INCONCLUSIVE in (self.finding, *self.others)

    @property
    def is_bad(self) -> bool:
        """Whether one of its classes makes an audit fail."""
        return any(name in BAD for name in (self.finding, *self.others))


def judge(trace: Trace, terms: Terms) -> Verdict:
    """The verdict on a message. Classes that need other messages (DISORDER, CORRUPT, BRIDGE_GAP) are an audit's."""
    wrong = list(_Judged(trace, terms).wrong())
    names = [name for name, _ in wrong]
    life = f"{trace.message_id}: {'; '.join(_life(trace))}"
    if not wrong:
        return Verdict(trace.message_id, "", f"{life}. Nothing is wrong with it")
    said = "; ".join(f"{name}: {why}" for name, why in wrong)
    return Verdict(trace.message_id, names[0], f"{life}. {said}", tuple(names[1:]))


class _Judged:
    """One message against the terms."""

    def __init__(self, trace: Trace, terms: Terms) -> None:
        self._trace = trace
        self._terms = terms
        states = {row.state for row in trace.rows}
        self._committed = "COMMITTED" in states
        self._tombstone = "ROLLED_BACK" in states and not self._committed
        self._strange = states - {"COMMITTED", "ROLLED_BACK"}
        self._queued = bool(trace.stands)
        self._sent = self._queued or "COMMITTED" in trace.outcomes
        self._is_closed = trace.at_us < terms.closed_before_us

    def wrong(self) -> Iterator[tuple[str, str]]:
        """The classes that apply, each with what is wrong; the outcome first."""
        outcome = self._outcome()
        if outcome is not None:
            name, why = outcome
            absent = [a for row in self._trace.rows if (a := self._terms.absent.get((row.database, row.shards)))]
            if self._terms.doubts and name in ("LOST", "IN_DOUBT", "ORPHAN_ROW"):
                yield INCONCLUSIVE, f"{why}; but the log is not whole: {self._terms.doubts[0]}"
            elif absent and name == "LOST":
                yield INCONCLUSIVE, f"{why}; but {absent[0]}"
            elif not self._is_closed and self._terms.unseen:
                yield INCONCLUSIVE, f"{why}; but {self._terms.unseen[0]}"
            elif not self._is_closed:
                yield "PENDING", f"{why}, and its transaction may not be over yet"
            else:
                yield name, why
        if self._queued and (outcome is None or outcome[0] not in ("CONFLICT", "GHOST")):
            yield from self._undelivered()
        yield from self._of_groups()
        yield from self._of_rows()

    def _outcome(self) -> tuple[str, str] | None:
        t, terms = self._trace, self._terms
        committed_there, rolled_back_there = "COMMITTED" in t.outcomes, "ROLLED_BACK" in t.outcomes
        if committed_there and rolled_back_there:
            return "CONFLICT", "the server recorded both outcomes"
        if self._committed and rolled_back_there:
            return "CONFLICT", "the database committed it, and the server rolled it back"
        if self._tombstone and committed_there and t.half_us:
            return "CONFLICT", "the database rolled it back, and the server committed it"
        if t.half_us and not t.outcomes and not self._queued:
            return "IN_DOUBT", "its half has no outcome, so no consumer receives it"
        waits = committed_there and not self._queued and t.due_us >= terms.closed_before_us
        if self._committed and not self._queued and not waits and t.at_us >= terms.log_from_us:
            for row in t.rows:
                is_passed = row.unmoved == WAITS and row.at_us <= terms.bridged_us.get(row.source, 0)
                if row.unmoved != MOVED and not is_passed:
                    return "DROPPED" if row.unmoved == DROPPED else "UNSENT", WHY[row.unmoved]
            if t.unmoved != MOVED:
                return "DROPPED" if t.unmoved == DROPPED else "UNSENT", WHY[t.unmoved]
            return "LOST", "the database committed it, and it is in no queue"
        if self._sent and self._is_ghost():
            return (
                "GHOST",
                f"it was delivered, and the database {'rolled it back' if self._tombstone else 'has no row'}",
            )
        is_retained = t.at_us >= terms.log_from_us
        if is_retained and not self._sent and not t.half_us and not t.outcomes and not self._committed:
            lost = any(restore.may_lack(t.at_us, terms.slack_us) for restore in terms.restores)
            if self._tombstone and t.at_us >= terms.halves_from_us:
                return "FORGOTTEN" if lost else "ORPHAN_ROW", "a tombstone without a half"
            if t.effects:
                return "FORGOTTEN" if lost else "ORPHAN_ROW", "an inbox row of a message that is in no queue"
        return None

    def _is_ghost(self) -> bool:
        t, terms = self._trace, self._terms
        if not t.producer_group or self._committed or self._strange:
            return False
        if self._tombstone:
            return not t.half_us
        if t.source is not None:
            is_covered = t.source in terms.sources
        else:  # only the half says that a message is of no database; retention may have deleted an older one
            is_told = bool(t.half_us) or t.at_us >= terms.halves_from_us
            is_covered = t.producer_group in terms.producer_groups and is_told
        return is_covered and t.at_us >= terms.rows_from_us

    def _undelivered(self) -> Iterator[tuple[str, str]]:
        t = self._trace
        if len(t.stands) > 1:
            yield "DUP_ENQUEUE", f"it is in {len(t.stands)} places of queues"
        missing = sorted(t.expected - t.settled.keys())
        if missing and (t.due_us or t.queued_us) < self._terms.settled_before_us:
            yield "UNDELIVERED", f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} not settled it"

    def _of_groups(self) -> Iterator[tuple[str, str]]:
        t, terms = self._trace, self._terms
        acked = {group for group, s in t.settled.items() if s.kind == "ACK" and (s.at_us or t.queued_us)}
        judged = {
            group
            for group in acked
            if (t.settled[group].at_us or t.queued_us) >= max(terms.inbox_from_us, t.inboxes_from.get(group, 0))
            and not 0 < terms.inbox_until_us <= (t.settled[group].at_us or terms.inbox_until_us)
        }
        lacking = sorted((judged & terms.inbox_groups) - t.effects.keys() - t.letters.keys())
        if unguarded := [group for group in lacking if group in t.proven]:
            yield (
                "UNGUARDED",
                f"{', '.join(unguarded)} has its effect, as --effects proves, and no row in the inbox",
            )
        if lacking := [group for group in lacking if group not in t.proven]:
            yield "ACKED_NO_EFFECT", f"{', '.join(lacking)} acknowledged it, and the inbox has no row of it"
        if unseen := sorted(filter(self._may_have_effect, acked - judged)):
            why = f"{', '.join(unseen)} acknowledged it, and the copy of the database may lack the row of the inbox"
            yield (INCONCLUSIVE, f"{why}: {terms.unseen[0]}") if terms.unseen else ("PENDING", why)
        doubled = sorted(group for group, rows in t.effects.items() if len(rows) > 1)
        if doubled:
            yield "DUP_EFFECT", f"inboxes of several databases have a row of it for {', '.join(doubled)}"
        known = t.expected | t.settled.keys() | t.attempts.keys()
        if t.readers is not None and (strange := sorted(t.effects.keys() - known - t.readers)):
            yield "ORPHAN_ROW", f"an inbox row of {', '.join(strange)}, which never subscribed to the topic"
        for group, why in sorted(t.left_out.items()):
            yield "LEFT_OUT", f"{group} never settled it: {why}"
        if dead := sorted(t.letters.keys() - t.left_out.keys() - t.let_go):
            yield "DEAD", "; ".join(_gave_up(t, group) for group in dead)
        if t.attempts:
            yield "REDELIVERED", f"it was delivered again to {', '.join(sorted(t.attempts))}"

    def _may_have_effect(self, group: str) -> bool:
        """Whether a group keeps an inbox, of which a copy may lack this message's row."""
        t, until_us = self._trace, self._terms.inbox_until_us
        if group in t.effects or group in t.letters or group in t.proven:
            return False
        is_late = 0 < until_us <= (t.settled[group].at_us or until_us)
        return is_late and (group in self._terms.inbox_groups or group in t.inboxes_from)

    def _of_rows(self) -> Iterator[tuple[str, str]]:
        t = self._trace
        if self._strange:
            yield "MALFORMED", f"its local row has the state {sorted(self._strange)[0][:40]!r}"
        if not all(row.is_dated for row in t.rows):
            yield "MALFORMED", "the created_at of its local row is no time"
        if any(row.has_capitals for row in t.rows):
            yield "MALFORMED", "the id of its local row is in capital letters"
        made_us = ids.milliseconds(ids.parse_message_id(t.message_id)[0]) * 1000
        if any(abs(row.at_us - made_us) > self._terms.slack_us for row in t.rows):
            yield "MISDATED", "the time of its local row and the one in its id are far apart"
        for row in t.rows:
            if t.source in self._terms.sources and t.source != name_hash(row.source):
                yield "ALTERED", f"the row is in database {row.database}, and its half came from another one"
            if row.state != "COMMITTED":
                continue
            if t.stands and row.topic is not None and row.topic != t.stands[0].topic:
                yield "ALTERED", f"the local row names topic {row.topic}, and it is in {t.stands[0].topic}"
            elif t.producer_group and row.producer_group != t.producer_group:
                names = f"producer group {row.producer_group}, and the log {t.producer_group}"
                yield "ALTERED", f"the local row names {names}"
            elif t.stands and None not in (row.digest, t.digest) and row.digest != t.digest:
                yield "ALTERED", "body, key or tag in the queue are not those of the local row"


def _life(t: Trace) -> Iterator[str]:
    """Its life in words, in the order in which it should go."""
    if not t.rows:
        yield "no given database has a row of it"
    for row in t.rows:
        what = {"COMMITTED": "committed", "ROLLED_BACK": "rolled back"}.get(row.state, row.state[:40])
        yield f"{what} in database {row.database} at {instant_text(row.at_us)}"
    if t.half_us and not t.stands:
        outcomes = f"{' and '.join(sorted(t.outcomes))} recorded" if t.outcomes else "no outcome recorded"
        yield f"its half stored at {instant_text(t.half_us)}, {outcomes}"
    if t.stands:
        yield f"queued at {instant_text(t.queued_us)} in {' and '.join(map(str, t.stands[:3]))}"
    elif t.due_us:
        yield f"due at {instant_text(t.due_us)}"
    else:
        yield "in no queue"
    for group in sorted(t.expected | t.settled.keys() | t.effects.keys() | t.letters.keys()):
        yield _with_group(t, group)


def _gave_up(t: Trace, group: str) -> str:
    shown = f"the inbox of {group}" if group in t.effects else "--effects" if group in t.proven else ""
    return f"{group} gave it up" + (f", and it took effect nevertheless, as {shown} shows" if shown else "")


def _with_group(t: Trace, group: str) -> str:
    settled = t.settled.get(group)
    if settled is None:
        what = f"not settled by {group}"
    else:
        at = f" at {instant_text(settled.at_us)}" if settled.at_us else ""
        what = f"settled by {group}{at}" + ("" if settled.kind in ("ACK", "DONE") else f" ({settled.kind})")
    if group in t.proven and group not in t.effects:
        what += ", with its effect, as --effects proves"
    if group in t.effects:
        what += f", with its effect at {instant_text(min(at_us for _, at_us in t.effects[group]))}"
    return what
