"""A verdict on one message, by the conditions of an audit (spark.judge.findings), and in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.protocol import ids
from notify.spark.checks.outbox_waiting import DROPPED, MOVED
from notify.spark.explain.trace import Trace
from notify.spark.inputs.columns import COMMITTED, ROLLED_BACK, TAKES_NO_PLACE, name_hash
from notify.spark.judge.evidence import detail, groups_of
from notify.spark.judge.findings import BAD, classes_of, judged_row
from notify.spark.judge.message_rows import (
    ABROAD,
    DATABASE,
    HALF_DROPPED,
    HALF_WAITS,
    MARKS,
    MASKS,
    PROVEN,
    UNKNOWN,
    UNMOVED,
    Groups,
)
from notify.spark.judge.terms import Terms
from notify.spark.result import Found
from notify.spark.times import instant_text

_OUTCOMES = {
    "CONFLICT": "is_conflict",
    "IN_DOUBT": "in_doubt",
    "LOST": "lost",
    "UNSENT": "is_unsent",
    "DROPPED": "is_dropped",
    "WITHDRAWN": "is_withdrawn",
    "GHOST": "ghost",
    "FORGOTTEN": "is_forgotten",
    "ORPHAN_ROW": "orphan",
}
"""The classes that say how a transaction ended, and the fact of each that holds also while it is PENDING."""
INCONCLUSIVE = "INCONCLUSIVE"
_STATES = {"COMMITTED": COMMITTED, "ROLLED_BACK": ROLLED_BACK}


@dataclass(frozen=True)
class Bounds:
    """The facts by which a trace is judged."""

    terms: Terms
    """Those of an audit, without the holes of logs: `doubts` names these."""
    databases: Sequence[str] = ()
    """The names of the databases."""
    origins: Mapping[int, int | None] = field(default_factory=dict)
    """The number of a database by the hash of its id. None: the id of a bridge or relay, which serves any of them."""
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


def judge(trace: Trace, bounds: Bounds) -> Verdict:
    """The verdict on a message. Classes that need other messages (DISORDER, CORRUPT, BRIDGE_GAP) are an audit's."""
    wrong = list(_Judged(trace, bounds).wrong())
    names = [name for name, _ in wrong]
    life = f"{trace.message_id}: {'; '.join(_life(trace))}"
    if not wrong:
        return Verdict(trace.message_id, "", f"{life}. Nothing is wrong with it")
    said = "; ".join(f"{name}: {why}" for name, why in wrong)
    return Verdict(trace.message_id, names[0], f"{life}. {said}", tuple(names[1:]))


def row_of(trace: Trace, bounds: Bounds, groups: Groups) -> dict[str, Any]:
    """The trace as a row of an audit, see spark.judge.message_rows and spark.judge.findings.facts."""
    t, transaction = trace, ids.parse_message_id(trace.message_id)[0]
    outcomes = sum(_STATES.get(outcome, 0) for outcome in t.outcomes)
    outcomes += t.withdrawn * MARKS
    if t.unmoved != MOVED:
        outcomes |= HALF_DROPPED if t.unmoved == DROPPED else HALF_WAITS
    states = [
        _STATES.get(row.state, UNKNOWN) + row.unmoved * UNMOVED + bounds.databases.index(row.database) * DATABASE
        for row in t.rows
    ]
    committed = [row for row in t.rows if row.state == "COMMITTED"]
    several = {
        "topic": [name_hash(topic) for topic in (*(s.topic for s in t.stands), *(r.topic for r in committed)) if topic],
        "digest": [digest for digest in (t.digest, *(row.digest for row in t.rows)) if digest is not None],
        "producer_group": [
            name_hash(group) for group in (t.producer_group, *(row.producer_group for row in t.rows)) if group
        ],
    }
    acked = {group: s.at_us for group, s in t.settled.items() if s.kind == "ACK" and group not in t.letters}
    acked_us = [at_us for at_us in acked.values() if at_us]
    late = {group for group, at_us in acked.items() if (at_us or t.queued_us) < t.inboxes_from.get(group, 0)}
    masks: dict[str, Any] = {
        "acked": acked, "settled": t.settled, "attempted": t.attempts, "effects": t.effects, PROVEN: t.proven,
        "expected": t.expected, "readers": t.readers, "before_inbox": late, "left": (),
    }  # fmt: skip
    row: dict[str, Any] = {
        "id": transaction,
        "made_us": ids.milliseconds(transaction) * 1000,
        "t_us": min((row.at_us for row in t.rows), default=None),
        "t_state": min(states, default=None),
        "other_state": max(states, default=None),
        "origin": None if t.source is None else bounds.origins.get(t.source, ABROAD),
        "half_us": t.half_us or None,
        "outcomes": outcomes,
        "due_us": t.due_us or None,
        "queued_us": t.queued_us or None,
        "place": 0 if t.stands else None,
        "places": len(t.stands),
        "offset": t.stands[0].offset if t.stands else None,
        "acked_us": min(acked_us, default=None),
        "last_acked_us": max(acked_us, default=None),
        "effect_us": min((at_us for rows in t.effects.values() for _, at_us in rows), default=None),
        "inbox_rows": sum(map(len, t.effects.values())),
    }
    for name, values in several.items():
        row |= {name: max(values, default=None), f"other_{name}": min(values, default=None)}
    for name, members in masks.items():
        for block in range(groups.blocks):
            row[f"{name}{block}"] = None if members is None else groups.mask(sorted(members), block)
    return row


class _Judged:
    """One message, judged."""

    def __init__(self, trace: Trace, bounds: Bounds) -> None:
        self._trace, self._bounds = trace, bounds
        t, inboxes = trace, bounds.terms.inbox_groups
        names = {*t.expected, *t.settled, *t.attempts, *t.effects, *t.proven, *(t.readers or ()), *inboxes}
        self._group_bits = Groups(sorted(names), (*MASKS, PROVEN))
        self._row = judged_row(row_of(trace, bounds, self._group_bits), bounds.terms, self._group_bits)
        self._classes = classes_of(self._row["classes"])

    def wrong(self) -> Iterator[tuple[str, str]]:
        """The classes that apply, each with what is wrong; the outcome first."""
        t = self._trace
        outcome = next((name for name, fact in _OUTCOMES.items() if self._row[fact]), "")
        if outcome:
            yield self._outcome(outcome)
        elif "PENDING" in self._classes:
            why = "a copy of a database may lack the inbox row"
            yield (INCONCLUSIVE, f"{why}: {self._bounds.unseen[0]}") if self._bounds.unseen else ("PENDING", why)
        for name in self._classes:
            if name not in (outcome, "PENDING"):
                yield name, self._why(name)
        if not all(local.is_dated for local in t.rows):
            yield "MALFORMED", "the created_at of its local row is not a time"
        if any(local.has_capitals for local in t.rows):
            yield "MALFORMED", "the id of its local row is in upper case"
        for group, why in sorted(t.left_out.items()):
            yield "LEFT_OUT", f"{group} never settled it: {why}"
        for group in sorted(t.passed - t.effects.keys() - t.proven - t.letters.keys()):
            if "ACKED_NO_EFFECT" not in self._classes:
                why = "another program committed an offset after it, and no inbox tells whether the group handled it"
                yield INCONCLUSIVE, f"{group}: {why}"
        if dead := sorted(t.letters.keys() - t.left_out.keys() - t.let_go):
            yield "DEAD", "; ".join(_gave_up(t, group) for group in dead)

    def _outcome(self, name: str) -> tuple[str, str]:
        """The class of a transaction's outcome; or why it cannot be told, or not yet."""
        why, bounds = self._why(name), self._bounds
        absent = [a for local in self._trace.rows if (a := bounds.absent.get((local.database, local.shards)))]
        if bounds.doubts and name in ("LOST", "IN_DOUBT", "ORPHAN_ROW"):
            return INCONCLUSIVE, f"{why}; but the log is not whole: {bounds.doubts[0]}"
        if absent and name == "LOST":
            return INCONCLUSIVE, f"{why}; but {absent[0]}"
        if name in self._classes:
            return name, why
        if bounds.unseen and not self._row["is_closed"]:
            return INCONCLUSIVE, f"{why}; but {bounds.unseen[0]}"
        if self._row["is_closed"]:
            return "PENDING", f"{why}; but the log may have dropped its record"
        return "PENDING", f"{why}; but its transaction may not be over yet"

    def _why(self, name: str) -> str:
        """The findings, in the words of an audit."""
        t, row = self._trace, self._row
        topics = [*(stand.topic for stand in t.stands), *(local.topic for local in t.rows if local.topic)]
        case = Found(
            name, topic=topics[0] if topics else "", producer_group=t.producer_group,
            groups=groups_of(name, row, self._group_bits, self._bounds.terms.inbox_groups),
            database=t.rows[0].database if t.rows else "",
        )  # fmt: skip
        recorded = row["outcomes"] & (COMMITTED | ROLLED_BACK)
        return detail(name, row | {"local": row["state"], "outcomes": recorded}, case)


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
    elif t.withdrawn & TAKES_NO_PLACE:
        yield "a withdrawal of another message, or collapsed by its dedupe key, and so in no queue"
    else:
        yield "in no queue"
    for group in sorted(t.expected | t.settled.keys() | t.effects.keys() | t.letters.keys()):
        yield _with_group(t, group)


def _gave_up(t: Trace, group: str) -> str:
    shown = f"the inbox of {group}" if group in t.effects else "--effects" if group in t.proven else ""
    return f"{group} gave it up" + (f", and it took effect anyway, as {shown} shows" if shown else "")


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
