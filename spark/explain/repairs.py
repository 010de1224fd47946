"""Repairs of a message: the ids under which it was sent again, their results, and who did it and why.

Servers keep records of an operator's writes, and plans have journals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.protocol import ids
from notify.spark.explain.history import History, history_of
from notify.spark.explain.judging import Bounds, Verdict, judge
from notify.spark.explain.trace import Trace
from notify.spark.inputs.actions import NOBODY_KNOWS, Record, recorded
from notify.spark.inputs.effects import BusinessEffects
from notify.spark.repair.journal import lines_of
from notify.spark.repair.plan import Item, read_plan
from notify.spark.result import Inputs
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id
from notify.storage.sql.administration import server_action

DROPPED = "dropped"
"""A dropped dead letter: its redrive's id has a note, and nothing was sent."""
MOST_RECORDS = 1000
"""The most records of one server that are looked at, the newest first."""
_DECISIONS = ("transaction.commit", "transaction.rollback", "plan.decide")


@dataclass(frozen=True)
class Sent:
    """A message that was sent again. `to`: the group that got it, "" for all. `what`: the action."""

    what: str
    of: str
    to: str
    verdict: Verdict
    at_us: int
    """When it came into a queue, in microseconds since 1970; 0: it did not."""
    record: Record | None
    """Who did it and why, if a server's records or a plan's journal say."""

    @property
    def sentence(self) -> str:
        """The repair in words."""
        if self.what == DROPPED:
            return f"{self.done}, {self._by}"
        to = f" to group {self.to}" if self.to else ""
        became = self.verdict.sentence.partition(": ")[2]
        return f"{self.what}{to} as {self.verdict.message_id}, {self._by}; {became}"

    @property
    def done(self) -> str:
        """The action in words, without its author and result."""
        if self.what == DROPPED:
            return f"dropped from the dead letters of group {self.to}"
        return f"{self.what} as {self.verdict.message_id}" + (f" to group {self.to}" if self.to else "")

    @property
    def _by(self) -> str:
        return self.record.by if self.record else NOBODY_KNOWS


def repairs_of(
    inputs: Inputs,
    history: History,
    bounds: Bounds,
    records: Sequence[Record],
    effects: Sequence[BusinessEffects] = (),
) -> list[Sent]:
    """All repeated messages of a transaction, the oldest first. The inputs must be prepared."""
    sent: list[Sent] = []
    for trace in list(history.traces.values()):
        for what, group, again in _candidates(inputs, history.transaction, trace):
            repeat = history_of(inputs, again, effects)
            repeated = repeat.traces.get(0)
            if repeated is not None and repeated.is_known:
                if any(stand.topic == dropped_topic(group) for stand in repeated.stands):
                    what = DROPPED
                verdict = _without_row(judge(repeated, bounds))
                record = _record_of(records, verdict.message_id, what, group, repeated.queued_us)
                sent.append(Sent(what, trace.message_id, group, verdict, repeated.queued_us, record))
    return sorted(sent, key=lambda each: each.at_us)


def decisions_of(transaction: str, records: Sequence[Record]) -> Iterator[Record]:
    """Who decided a transaction, if a person did."""
    for record in records:
        if record.what in _DECISIONS and (record.target == transaction or transaction in record.result):
            yield record


def origin_of(message_id: str, records: Sequence[Record]) -> Record | None:
    """The record that says which message this one repeats."""
    return next((record for record in records if f'"as": "{message_id}"' in record.result), None)


def _candidates(inputs: Inputs, transaction: bytes, trace: Trace) -> Iterator[tuple[str, str, bytes]]:
    """The ids under which a message would have been sent again: what was done, for which group, and the id.

    Only those that an input knows.
    """
    number = ids.parse_message_id(trace.message_id)[1]
    groups = {name for log in inputs.logs for name in log.groups() if "@" not in name}
    groups |= trace.expected | trace.settled.keys() | trace.effects.keys()
    chosen = {ids.derived(transaction, ids.republished(number)): ("published again", "")}
    for group in sorted(groups):
        chosen[ids.derived(transaction, ids.redelivered(group, number))] = ("sent again", group)
    for group, letters in trace.letters.items():
        for letter in letters:
            chosen[redriven_id(dead_letter_topic(group), transaction, letter.offset)] = ("redriven", group)
    known = {row["id"] for log in inputs.logs for row in log.messages_of(chosen)}
    for database in inputs.databases:
        rows = database.inbox_of([ids.message_id(again, 0) for again in chosen])
        known |= {ids.from_text(row["message_id"].partition(".")[0]) for row in rows}
    for again, (what, group) in chosen.items():
        if again in known:
            yield what, group, again


def _without_row(verdict: Verdict) -> Verdict:
    """A message that is sent again has no local row of its own."""
    return Verdict(
        verdict.message_id, verdict.finding, verdict.sentence.replace("no given database has a row of it; ", ""),
        verdict.others,
    )  # fmt: skip


def _record_of(records: Sequence[Record], again: str, what: str, group: str, queued_us: int) -> Record | None:
    naming = [record for record in records if record.names(again) or f'"as": "{again}"' in record.result]
    by_job = {"redriven": "dead_letter.redrive", DROPPED: "dead_letter.drop"}.get(what)
    if naming or by_job is None:
        return next(iter(naming), None)
    # For a job over all matching dead letters the record names only the group, and was written when the job began.
    before = [r for r in records if r.what == by_job and r.target == group and r.at_us <= queued_us]
    return before[-1] if before else None


def records_of(inputs: Inputs, transaction: str, plans: Sequence[Path]) -> list[Record]:
    """The records that may concern a transaction, the oldest first."""
    records = recorded(inputs, _concerns(transaction), MOST_RECORDS)
    for path in plans:
        records += _of_plan(path, transaction)
    return sorted(records, key=lambda record: record.at_us)


def _concerns(transaction: str) -> sa.ColumnElement[bool]:
    """Whether a write names the transaction, or redrives or drops many dead letters, which names none."""
    c = server_action.c
    named = c.result.contains(transaction, autoescape=True) | c.target.startswith(transaction, autoescape=True)
    return named | c.what.in_(("dead_letter.redrive", "dead_letter.drop"))


def _of_plan(path: Path, transaction: str) -> Iterator[Record]:
    """The items of a plan that concern a transaction, with the entries of its journal. Raises InvalidRequest."""
    plan = read_plan(path)
    items: dict[str, Item] = {i.key: i for i in plan.items if i.message_id.partition(".")[0] == transaction}
    begun: dict[str, dict[str, Any]] = {}
    for line in lines_of(path):
        item = items.get(line["key"])
        if item is None:
            continue
        if line["state"] == "begun":
            begun[item.key] = line
            continue
        start = begun.get(item.key, {})
        result = {"id": item.message_id, "as": line.get("as", ""), "status": line["status"], "detail": line["detail"]}
        yield Record(
            start.get("at_us", 0), f"plan {path.name}", start.get("who", ""), f"plan.{item.action}", item.group,
            start.get("reason", "no reason was noted"), json.dumps({"items": [result]}),
        )  # fmt: skip
