"""Explains one transaction: a verdict on each of its messages, its events, and every repair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from notify.protocol import ids
from notify.protocol.wire import instant
from notify.spark.checks import left_out
from notify.spark.explain.history import Event, History, history_of
from notify.spark.explain.judging import Bounds, Verdict, judge
from notify.spark.explain.repairs import DROPPED, Sent, decisions_of, origin_of, records_of, repairs_of
from notify.spark.inputs.actions import Record
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.effects import business_effects
from notify.spark.inputs.missing_logs import absent_shards, judged_span, reason_of
from notify.spark.inputs.ranges import Span
from notify.spark.inputs.shards import movers_of
from notify.spark.judge.coverage import terms_of
from notify.spark.result import Inputs


@dataclass(frozen=True)
class Explained:
    """A transaction explained. `verdicts`: one for each message; none if no source knows it."""

    verdicts: Sequence[Verdict]
    events: Sequence[Event]
    repairs: Sequence[Sent]
    decisions: Sequence[Record]
    """Outcomes that a person recorded."""
    repeats: str
    """A message that this one repeats, and who sent it again; "" if it repeats none."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence for each message."""
        if not self.verdicts:
            return "none of the given databases and logs knows this transaction"
        return "\n".join(self._with_repairs(verdict) for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong, or it is repaired; 1: something is wrong, or no source knows it; 2: something may be
        wrong, and the proof could not be seen."""
        if not self.verdicts or any(v.is_bad and not self._is_repaired(v) for v in self.verdicts):
            return 1
        return 2 if any(v.is_open and not self._is_repaired(v) for v in self.verdicts) else 0

    def _is_repaired(self, verdict: Verdict) -> bool:
        return any(
            sent.of == verdict.message_id and sent.what != DROPPED and sent.at_us and not sent.verdict.is_bad
            for sent in self.repairs
        )

    def _with_repairs(self, verdict: Verdict) -> str:
        again = [sent for sent in self.repairs if sent.of == verdict.message_id]
        if not again:
            return f"{verdict.sentence}."
        is_sent = any(sent.what != DROPPED for sent in again)
        state = (
            "It is repaired" if self._is_repaired(verdict) else "It was sent again" if is_sent else "It was given up"
        )
        return f"{verdict.sentence}. {state}: " + "; ".join(sent.done for sent in again) + "."

    def plain(self, asked: str) -> dict[str, Any]:
        """As in the JSON."""
        return {
            "transaction": asked,
            "verdict": self.sentence,
            "finding": next((v.finding for v in self.verdicts if v.finding), ""),
            "repeats": self.repeats,
            "messages": [
                {
                    "message_id": v.message_id, "finding": v.finding, "others": list(v.others), "sentence": v.sentence,
                    "repaired": self._is_repaired(v),
                }
                for v in self.verdicts
            ],
            "events": [{"at_us": e.at_us, "source": e.source, "what": e.what} for e in self.events],
            "repairs": [
                {
                    "what": sent.what, "of": sent.of, "as": sent.verdict.message_id, "group": sent.to,
                    "at_us": sent.at_us, "finding": sent.verdict.finding, "became": sent.verdict.sentence,
                    "who": sent.record.who if sent.record else "", "reason": sent.record.reason if sent.record else "",
                    "record": sent.record.source if sent.record else "",
                }
                for sent in self.repairs
            ],
            "decisions": [
                {"at": instant(r.at_us), "what": r.what, "who": r.who, "reason": r.reason} for r in self.decisions
            ],
            "exit_code": self.exit_code,
        }  # fmt: skip


def explain(
    inputs: Inputs,
    text: str,
    scratch: Path | str,
    times: tuple[float, float] = (600.0, 600.0),
    plans: Sequence[Path] = (),
    effects: Sequence[tuple[str, str]] = (),
) -> Explained:
    """Explain a transaction or a message by its id. Raises InvalidRequest for anything else, and HiddenRows.

    `times`: the seconds that a transaction, and a delivery, may take. `plans`: plans that may have been carried out;
    their journals say by whom and why. `effects`: as of an audit's plan. `scratch`: for copies of the logs' segments.
    """
    transaction, number = ids.parse_message_id(text)
    for database in (*inputs.databases, *inputs.storages):
        database.check_seen()
    queries = business_effects(inputs.databases, effects)
    for query in queries:
        query.check_seen()
    for log in inputs.logs:
        log.prepare(None, scratch)
    for kafka in inputs.kafka:
        kafka.prepare()
    history = history_of(inputs, transaction, queries)
    records = records_of(inputs, ids.to_text(transaction), plans)
    bounds = _bounds(inputs, history, *(round(seconds * 1e6) for seconds in times))
    known = [trace for _, trace in sorted(history.traces.items()) if trace.is_known]
    chosen = [trace for trace in known if "." not in text or trace.message_id == ids.message_id(transaction, number)]
    repairs = repairs_of(inputs, history, bounds, records, queries)
    for trace in history.traces.values():
        of_letters = {sent.to: sent.what == DROPPED for sent in repairs if sent.of == trace.message_id and sent.to}
        trace.left_out = left_out.of_trace(inputs, trace, of_letters)
    decisions = list(decisions_of(ids.to_text(transaction), records))
    events = [*history.events, *_events(repairs, decisions)]
    events.sort(key=lambda event: event.at_us)
    origin = origin_of(ids.message_id(transaction, number), records)
    repeats = f"it repeats another message, sent again {origin.by}" if origin else ""
    return Explained([judge(trace, bounds) for trace in chosen], events, repairs, decisions, repeats)


def _events(repairs: Sequence[Sent], decisions: Sequence[Record]) -> list[Event]:
    events = [
        Event(sent.at_us, sent.record.source if sent.record else "repair", f"message {sent.of}: {sent.sentence}")
        for sent in repairs
        if sent.at_us
    ]
    return events + [Event(r.at_us, r.source, f"{r.what} {r.by}") for r in decisions]


def _bounds(inputs: Inputs, history: History, longest_us: int, deliver_us: int) -> Bounds:
    logs, clusters = [log.watermark_us for log in inputs.logs], [kafka.watermark_us for kafka in inputs.kafka]
    watermark_us = min([time.time_ns() // 1000, *logs, *clusters])
    databases = [*inputs.databases, *inputs.storages]
    replicas = [(each.name, replica) for each in databases if (replica := each.replica()) is not None]
    copies = [replica.until_us for _, replica in replicas]
    inbox_groups = frozenset(name for database in inputs.databases for name in database.inbox_groups())
    terms = terms_of(inputs, inbox_groups, copies, watermark_us, longest_us, deliver_us)
    first_us = min((trace.at_us for trace in history.traces.values() if trace.at_us), default=0)
    from_us = max(0, first_us - terms.slack_us)
    origins: dict[int, int | None] = dict.fromkeys(map(name_hash, movers_of(inputs)))
    for number, database in enumerate(inputs.databases):
        if source := database.source_id():
            origins[name_hash(source)] = number
    judged = judged_span(terms.log_from_us, watermark_us - longest_us, terms.slack_us)
    return Bounds(
        replace(terms, covered_groups=frozenset(map(name_hash, _with_rows(inputs, history)))),
        databases=[database.name for database in inputs.databases],
        origins=origins,
        doubts=tuple(problem for log in inputs.logs for problem in (*log.problems, *log.unread(from_us))),
        absent=_absent(inputs, history, judged),
        unseen=tuple(
            f"database {name} follows another one, and what it has is not known: {replica.why}; name the primary"
            for name, replica in replicas
            if not replica.until_us
        ),
    )


def _absent(inputs: Inputs, history: History, judged: Span) -> dict[tuple[str, str], str]:
    """The shards whose log was not given: asked for, which reads whole tables, only where a message seems lost."""
    if not any(not t.stands and any(row.shards for row in t.rows) for t in history.traces.values()):
        return {}
    absent = absent_shards(inputs, None, judged)
    names = [(inputs.databases[number].name, value) for number, values in absent.items() for value in values]
    return {(database, value): reason_of(database, value) for database, value in names}


def _with_rows(inputs: Inputs, history: History) -> frozenset[str]:
    """The producer groups with local rows: read from a whole table only if no half names a source."""
    traces = history.traces.values()
    if not any(t.source is None and t.producer_group and not t.rows and (t.stands or t.outcomes) for t in traces):
        return frozenset()
    return frozenset(name for database in inputs.databases for name in database.producer_groups())
