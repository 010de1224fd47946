"""Plans repairs of an audit's findings: what can be repaired without harm, and what is held back, with reasons.

* IN_DOUBT: asks the database as a check does, and records its answer. If the database has no row, a tombstone is
  inserted, so that the transaction can no longer commit.
* LOST and CONFLICT, if the database committed: publishes the message again, from the local row if that has a body
  (outbox), otherwise from the server's half.
* ACKED_NO_EFFECT: sends the message again, only to the group whose inbox lacks it.

Nothing is sent again if an effect (by an inbox or by --effects), a place in a queue or a doubt exists. But a
message that a log lost with its disk is published again for the groups that had not handled it yet, and inboxes that
know it skip it. Other findings need a person: a message that should not have been delivered cannot be called back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from notify.protocol import ids
from notify.protocol.wire import instant
from notify.spark.inputs.effects import BusinessEffects, business_effects
from notify.spark.judge.findings import BY_NAME
from notify.spark.judge.terms import SKEW_US
from notify.spark.repair.current_state import (
    NONE,
    Effects,
    effects_of,
    parts,
    rows_of,
    unread_of,
    why_expired,
    why_malformed,
    why_unmoved,
)
from notify.spark.repair.plan import VERSION, Held, Identity, Item, RepairPlan
from notify.spark.result import Found, Inputs, Result

FEW = 10
"""Up to this many lost messages, or missing effects, do not suggest that a whole input is missing."""
MOST_HELD = 1000
"""The most findings that are listed as held back, of each class."""


def plan_of(
    result: Result,
    inputs: Inputs,
    *,
    effects: Sequence[tuple[str, str]] = (),
    force: bool = False,
    done: Mapping[str, Mapping[str, Any]] | None = None,
) -> RepairPlan:
    """The plan for an audit's result. Changes nothing; asks the databases for effects and rows of what it plans.

    `effects`: the queries of the audit's plan: messages that they find are not sent again. `force`: plan although the
    audit is inconclusive, as after a restore, when a person knows what the log lacks. `done`: what earlier repairs did,
    by item (see `done_beside`); those of which nothing is left are planned again.
    """
    cases = [f for f in result.found if _is_told(f) and not f.evidence.get("repaired")]
    queries = business_effects(inputs.databases, effects)
    known_groups = groups_of(inputs) if effects else []
    planned: list[Item | Held] = []
    if result.reasons and not force:
        why = "the audit has reasons to doubt itself (see doubts): put those right, and audit again"
        planned += [_held(f, why) for f in cases]
    else:
        for part in parts(cases):
            planned += _Part(inputs, part, queries, known_groups).planned()
    items = [_with_earlier(each, done or {}) for each in planned if isinstance(each, Item)]
    return RepairPlan(
        VERSION,
        instant(time.time_ns() // 1000),
        instant(result.from_us),
        instant(result.to_us),
        names_of(inputs),
        result.verdict,
        {name: count for name, count in result.counts.items() if count},
        list(result.reasons),
        [*_undone(items), *_alarming(result, inputs, items)],
        items,
        _fewer(each for each in planned if isinstance(each, Held)),
        {name: msgspec.structs.replace(known, segments=()) for name, known in identities_of(inputs).items()},
        unread_of(inputs.logs),
        list(effects),
        known_groups,
    )


def _is_told(f: Found) -> bool:
    """Whether a plan can repair a finding, or holds it back."""
    return BY_NAME[f.finding].is_bad or f.finding == "UNGUARDED"


def names_of(inputs: Inputs) -> list[str]:
    """The names of databases and queues."""
    databases = [f"database {database.name}" for database in inputs.databases]
    return [*databases, *(f"log {log.name}" for log in inputs.logs), *(kafka.name for kafka in inputs.kafka)]


def identities_of(inputs: Inputs) -> dict[str, Identity]:
    """The identity of each input, by name. Kafka has none."""
    known = {f"database {database.name}": Identity(database.source_id()) for database in inputs.databases}
    for log in inputs.logs:
        segments = tuple(segment.identity for segment in log.segments)
        # The file of a running server ends with reserved room, which is cut when the server stops.
        end = log.facts[-1].durable if log.facts else log.segments[-1].base + log.segments[-1].size
        known[f"log {log.name}"] = Identity(segment=segments[-1], end=end, segments=segments)
    return known


def groups_of(inputs: Inputs) -> list[str]:
    """All consumer groups that the inputs know."""
    known = [log.groups() for log in inputs.logs] + [kafka.groups() for kafka in inputs.kafka]
    return sorted(set().union(*known, *(database.inbox_groups() for database in inputs.databases)))


EARLIER = "done_before"
"""The name of the evidence that an earlier repair did the same."""


def _with_earlier(item: Item, done: Mapping[str, Mapping[str, Any]]) -> Item:
    """The item, with what an earlier repair did as evidence."""
    line = done.get(item.key)
    if line is None:
        return item
    told = f"{instant(line.get('at_us', 0))} by {line.get('who') or 'somebody'}: {line.get('reason') or 'no reason'}"
    return msgspec.structs.replace(item, evidence=item.evidence | {EARLIER: told})


def _undone(items: Sequence[Item]) -> list[str]:
    """A sign that a log was replaced by an older copy."""
    count = sum(EARLIER in item.evidence for item in items)
    if not count:
        return []
    return [f"{count:,} repairs that were done before, as journals here say, are gone: a log may be an older copy"]


def _alarming(result: Result, inputs: Inputs, items: Sequence[Item]) -> list[str]:
    """Signs that a whole input is lost rather than single messages."""
    reasons = []
    lost = sum(item.action == "republish" for item in items)
    committed = result.totals.get("committed", 0)
    if lost > FEW and 2 * lost > committed:
        reasons.append(f"{lost:,} of {committed:,} committed messages are in no queue: a log may be missing instead")
    missing: dict[str, int] = {}
    for item in items:
        if item.action == "redeliver":
            missing[item.group] = missing.get(item.group, 0) + 1
    for group, count in sorted(missing.items()):
        there = sum(database.inbox_count(group, count) for database in inputs.databases)
        if count > FEW and count > there:
            reasons.append(
                f"the inbox of group {group} lacks {count:,} effects and has {there:,}: its rows may be gone instead"
            )
    return reasons


def _fewer(held: Iterable[Held]) -> list[Held]:
    kept: list[Held] = []
    by_class: dict[str, int] = {}
    for each in held:
        by_class[each.finding] = by_class.get(each.finding, 0) + 1
        if by_class[each.finding] <= MOST_HELD:
            kept.append(each)
    more = {name: count - MOST_HELD for name, count in by_class.items() if count > MOST_HELD}
    return kept + [Held(name, "", f"and {count:,} more") for name, count in more.items()]


def _held(f: Found, why: str) -> Held:
    return Held(f.finding, f.message_id, why, {"detail": f.detail} | f.evidence)


class _Part:
    """Some cases, with what the databases have of them."""

    def __init__(
        self, inputs: Inputs, cases: Sequence[Found], queries: Sequence[BusinessEffects], known_groups: Sequence[str]
    ) -> None:
        self._cases = cases
        self._over_kafka = not inputs.logs
        self._restores = [restore for log in inputs.logs for restore in log.catalog.restores]
        sent_again = [f for f in cases if BY_NAME[f.finding].repair]
        names = [f.message_id for f in sent_again] + [name for f in sent_again for name in _again(f).values()]
        self._effects = effects_of(inputs.databases, names, queries, known_groups)
        self._rows = rows_of(inputs.databases, [f.message_id for f in sent_again])
        purged = [database.purged()[1] for database in inputs.databases]
        self._inbox_from_us = max(purged, default=0)

    def planned(self) -> Iterator[Item | Held]:
        for f in self._cases:
            if f.finding == "IN_DOUBT":
                if f.message_no == 0:
                    yield self._decided(f)
            elif f.finding in ("LOST", "CONFLICT"):
                yield self._republished(f)
            elif f.finding == "ACKED_NO_EFFECT":
                yield from self._redelivered(f)
            elif f.finding == "UNGUARDED":
                groups = _listed(f.groups)
                yield _held(f, f"it took effect in {groups}, as --effects proves: only the row of the inbox is gone")
            else:
                yield _held(f, f"needs a person: {BY_NAME[f.finding].action}")

    def _decided(self, f: Found) -> Item | Held:
        if effects := self._effects.get(f.message_id):
            return _held(f, f"it has no outcome, and {effects}: someone has to look")
        states = {row.state for row in self._rows.get(f.message_id, ())}
        if len(states) > 1:
            return _held(f, "one database committed it, and another rolled it back")
        outcome = "commit" if states == {"COMMITTED"} else "rollback"
        row = {"COMMITTED": "the row of a commit", "ROLLED_BACK": "a tombstone"}.get(next(iter(states), ""), "no row")
        return self._item(f, f"ask the database, which has {row}, and record {outcome}", outcome=outcome)

    def _republished(self, f: Found) -> Item | Held:
        rows = self._rows.get(f.message_id, [])
        effects = self._of(f, _again(f)[""])
        # An inbox skips messages that it knows; an effect that only --effects proves would happen a second time.
        skipped_by = sorted(effects.inboxes) if effects and not effects.unguarded and self._lost_with_its_log(f) else []
        why = ""
        if f.evidence.get("local") != "COMMITTED" or {row.state for row in rows} != {"COMMITTED"}:
            why = "no given database has it as committed: effects of it, if there are any, are undone by hand"
        elif effects and not skipped_by:
            why = f"{effects}: a log is missing rather than the message"
            if self._lost_with_its_log(f):
                why = f"{effects}, whose inbox would not skip it: send it to the groups that lack it by hand"
        elif f.evidence.get("effect_us") and not skipped_by:
            why = "it took effect: a log is missing rather than the message"
        elif f.evidence.get("queued_us"):
            why = "it is in a queue"
        elif unmoved := why_unmoved(rows):
            why = f"{unmoved}: a relay or bridge that runs sends it, or notify bridge --backfill-from"
        elif self._over_kafka:
            why = "no server has these queues: notify bridge --backfill-from sends it to Kafka again"
        elif f.at_us < self._inbox_from_us:
            why = "rows of inboxes from that time are purged, so it is unknown whether it took effect"
        elif malformed := why_malformed(rows):
            why = malformed
        elif expired := why_expired(rows, time.time_ns() // 1000):
            why = expired
        elif not rows[0].message and not f.evidence.get("half_us"):
            why = "neither the local row nor a half has its content: send it again from the business data"
        if why:
            return _held(f, why)
        where = "the local row" if rows[0].message else "the server's half"
        what = f"publish it again from {where}, to every group of its topic"
        if skipped_by:
            what += f"; the log lost it with its disk, and the inboxes of {_listed(skipped_by)} skip it"
        due_us = rows[0].due_us if rows[0].message else f.evidence.get("due_us", 0)
        if due_us > time.time_ns() // 1000:
            what += f", at its time, {instant(due_us)}"
        return self._item(f, what, again=_again(f)[""], content=rows[0].digest, skipped_by=tuple(skipped_by))

    def _of(self, f: Found, again: str = "") -> Effects:
        """The effects of a case's message, and of its repetition."""
        return self._effects.get(f.message_id, NONE) | self._effects.get(again, NONE)

    def _lost_with_its_log(self, f: Found) -> bool:
        """Whether it was stored after the last shipped segment of a log whose disk was lost."""
        at_us = f.evidence.get("t_us") or f.at_us
        unknown = f.finding == "LOST" and f.evidence.get("server") == "unknown"
        return unknown and any(restore.may_lack(at_us, SKEW_US) for restore in self._restores)

    def _redelivered(self, f: Found) -> Iterator[Item | Held]:
        for group, again in _again(f).items():
            if why := self._of(f, again).why_not_to(group):
                yield _held(f, why)
            elif not f.log:
                yield _held(f, f"no server has its queue: reset group {group} over Kafka, whose inbox skips the rest")
            elif f.evidence.get("acked_us", f.evidence.get("queued_us", 0)) < self._inbox_from_us:
                yield _held(f, f"rows of the inbox from that time are purged, so it is unknown whether {group} had it")
            else:
                yield self._item(f, f"send it to {group} again", group=group, again=again)

    def _item(self, f: Found, what: str, **fields: str | tuple[str, ...]) -> Item:
        action = BY_NAME[f.finding].repair
        key = ":".join(part for part in (action, f.message_id, str(fields.get("group", ""))) if part)
        effects = self._of(f, str(fields.get("again", "")))
        shown = {"topic": f.topic, "queue": f.queue, "offset": f.offset, "producer_group": f.producer_group}
        known = {name: value for name, value in shown.items() if value not in ("", None)}
        first = {"detail": f.detail, "at": instant(f.at_us), "effects": effects.listed or "none"}
        evidence = first | known | f.evidence
        return Item(key, action, f.finding, f.message_id, what, evidence=evidence, **fields)  # type: ignore[arg-type]


def _again(f: Found) -> dict[str, str]:
    """The ids under which a case's message is sent again, by group ("": to all)."""
    if f.finding not in ("LOST", "CONFLICT", "ACKED_NO_EFFECT"):
        return {}
    transaction, number = ids.parse_message_id(f.message_id)
    if f.finding == "ACKED_NO_EFFECT":
        salts = {group: ids.redelivered(group, number) for group in f.groups}
    else:
        salts = {"": ids.republished(number)}
    return {group: ids.message_id(ids.derived(transaction, salt), 0) for group, salt in salts.items()}


def _listed(groups: Iterable[str]) -> str:
    return ", ".join(sorted(groups))
