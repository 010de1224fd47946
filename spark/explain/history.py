"""The history of one transaction from every source: its events in order of time, and a trace of each message."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.kafka.subscriptions import Place
from notify.protocol import ids
from notify.protocol.message import schedule_of
from notify.protocol.wire import UNDECODABLE, decode_payload
from notify.spark.checks.late_inboxes import begins_us
from notify.spark.checks.outbox_waiting import MOVED, WAITS, bridged_us, bridges_of, unmoved_of
from notify.spark.digest import hashes
from notify.spark.explain.trace import Row, Settled, Stand, Trace
from notify.spark.inputs.columns import ATTEMPTED, WITHDRAWN, name_hash, origin_of
from notify.spark.inputs.databases import Database
from notify.spark.inputs.effects import BusinessEffects, proven_of
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.shards import ids_of
from notify.spark.result import Inputs
from notify.storage.groups import SettleKind
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.sql.rows import microseconds_of

MOST_MESSAGES = 100
"""The most messages of a transaction that are shown, apart from those that a source knows."""


@dataclass(frozen=True)
class Event:
    """One event: when (microseconds since 1970, by the source's clock), where, and what happened."""

    at_us: int
    source: str
    what: str


@dataclass
class History:
    """The events, and the trace of each message by its number."""

    transaction: bytes
    events: list[Event] = field(default_factory=list)
    traces: dict[int, Trace] = field(default_factory=dict)

    def trace(self, number: int) -> Trace:
        name = ids.message_id(self.transaction, number)
        return self.traces.setdefault(number, Trace(name))

    def note(self, at_us: int, source: str, what: str) -> None:
        self.events.append(Event(at_us, source, what))


def history_of(inputs: Inputs, transaction: bytes, effects: Sequence[BusinessEffects] = ()) -> History:
    """All that prepared inputs, and what proves effects, know of a transaction; no event if none knows it."""
    history = History(transaction)
    for log in inputs.logs:
        _OfLog(log, history).take()
    for kafka in inputs.kafka:
        _of_kafka(kafka, history)
    for storage in inputs.storages:
        _of_storage(storage, history, bridged_us(ids_of(storage), bridges_of(inputs.logs, inputs.kafka)))
    rolled_back: list[Row] = []
    for database in inputs.databases:
        rolled_back += _of_local_rows(database, history)
    for trace in history.traces.values():
        trace.rows += [row for row in rolled_back if row not in trace.rows]
    numbers = range(max(history.traces, default=0) + MOST_MESSAGES)
    for database in inputs.databases:
        _of_inbox(database, history, numbers)
    for name, groups in proven_of(effects, [trace.message_id for trace in history.traces.values()]).items():
        history.trace(ids.parse_message_id(name)[1]).proven |= groups
    history.events.sort(key=lambda event: event.at_us)
    return history


class _OfLog:
    """Takes what one log has of a transaction."""

    def __init__(self, log: LogInput, history: History) -> None:
        self._log = log
        self._history = history
        self._source = f"log {log.name}"
        self._stands: dict[tuple[int, int, int], tuple[int, Stand]] = {}
        """By topic number, queue and offset: the message's number, and its place."""

    def take(self) -> None:
        entries = self._log.entries_of(self._history.transaction)
        is_rolled_back = False
        for m in entries["messages"]:
            if m["outcome"] == 2:
                is_rolled_back = True
                self._history.note(m["decided_us"], self._source, "ROLLED_BACK recorded")
            if m["half_us"] is not None or m["offset"] is not None or m["outcome"] == 1:
                self._message(m)
        if is_rolled_back:
            for trace in self._history.traces.values() or [self._history.trace(0)]:
                trace.outcomes.add("ROLLED_BACK")
        self._say_which_schedule(entries["messages"])
        for c in entries["checks"]:
            event = f"check {c['answered']} was answered, and left the transaction undecided"
            self._history.note(c["at_us"], self._source, event + ("; PARKED" if c["parked"] else ""))
        for a in entries["acks"]:
            self._ack(a)

    def _say_which_schedule(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Note the schedule that sent a message, which the message's headers name."""
        queued_us = {m["no"]: m["queued_us"] for m in messages if m["half_us"] is None and m["queued_us"] is not None}
        if not queued_us:
            return  # it has a half: a producer sent it
        for _, number, payload in self._log.payloads([self._history.transaction]):
            try:
                schedule = schedule_of(decode_payload(payload).headers)
            except UNDECODABLE:
                continue
            if schedule and number in queued_us:
                self._history.note(queued_us[number], self._source, f"message {number} sent by schedule {schedule}")

    def _message(self, m: Mapping[str, Any]) -> None:
        history, source, catalog = self._history, self._source, self._log.catalog
        number, topic = m["no"], catalog.topics.get(m["topic"], str(m["topic"]))
        stand = None
        if m["offset"] is not None:
            stand = Stand(source, topic, m["queue"], m["offset"], m["queued_us"])
            self._stands[m["topic"], m["queue"], m["offset"]] = (number, stand)
        trace = history.trace(number)
        if stand is not None and catalog.kind_of(topic) == "dead_letter":
            group = topic.removeprefix(DEAD_LETTER_PREFIX)
            trace.letters.setdefault(group, []).append(stand)
            history.note(m["queued_us"], source, f"message {number} a dead letter of group {group}: {stand}")
            return
        group = catalog.producer_groups.get(m["producer_group"]) or ""
        trace.producer_group = trace.producer_group or group
        trace.digest = m["digest"] or trace.digest  # the segment of the queue may not have the payload
        if m["half_us"] is not None:
            trace.half_us, trace.source = m["half_us"], m["source"]
            sender = group or "no producer group"
            history.note(m["half_us"], source, f"half of message {number} to {topic} stored for {sender}")
        if m["outcome"] == 1:
            trace.outcomes.add("COMMITTED")
        if m["withdrawn"]:
            trace.withdrawn |= m["withdrawn"]
            what = "withdrawn" if m["withdrawn"] & WITHDRAWN else "a withdrawal, or collapsed: it takes no place"
            history.note(m["decided_us"], source, f"message {number} is {what}")
        if m["due_us"] is not None:
            trace.due_us = m["due_us"]
            history.note(m["decided_us"], source, f"COMMITTED recorded; message {number} waits for its time")
        if stand is not None:
            trace.stands.append(stand)
            wanted = self._log.wanted().get((m["topic"], m["queue"]), ())
            trace.expected |= {name for name, start in wanted if m["offset"] >= start}
            for left in self._log.left.get((m["topic"], m["queue"]), ()):
                if left.holds(m["offset"], m["queued_us"]):
                    trace.left[left.group] = left, stand
            begun = {s.group: begins_us(s) for s in catalog.subscriptions.values() if s.topic == topic}
            trace.inboxes_from |= begun
            trace.readers = (trace.readers or set()) | self._log.readers().get((m["topic"], m["queue"]), set())
            history.note(m["queued_us"], source, f"message {number} in queue {stand}")

    def _ack(self, a: Mapping[str, Any]) -> None:
        number, stand = self._stands[a["topic"], a["queue"], a["offset"]]
        trace, group = self._history.trace(number), a["group"]
        is_letter = stand not in trace.stands
        if a["kind"] == ATTEMPTED:
            after = f"after attempt {a['attempts']}" if a["attempts"] else "because its consumer was stopping"
            event = f"group {group} will receive {stand} again, {after}"
            trace.attempts[group] = max(trace.attempts.get(group, 0), a["attempts"])
        else:
            kind = SettleKind(a["kind"]).name
            event = f"group {group} acknowledged {stand}" if kind == "ACK" else f"group {group} settled {stand}: {kind}"
            if not is_letter:
                trace.settled[group] = Settled(kind, a["at_us"])
        self._history.note(a["at_us"], self._source, event)


def _of_kafka(kafka: KafkaInput, history: History) -> None:
    failed: list[tuple[Trace, str, Stand]] = []
    for row in kafka.records_of(history.transaction):
        trace = history.trace(row["no"])
        place, _, offset = row["place"].rpartition("@")
        topic, _, partition = place.rpartition("/")
        stand = Stand(kafka.name, topic, int(partition), int(offset), row["queued_us"])
        trace.producer_group = trace.producer_group or row["producer_group"] or ""
        group, is_dead = kafka.progress.owner_of(topic) or ("", False)
        if group and row["attempt"] is not None and row["attempt"] > 1:
            trace.attempts[group] = max(trace.attempts.get(group, 0), row["attempt"])
        if is_dead:
            trace.letters.setdefault(group, []).append(stand)
            history.note(stand.queued_us, kafka.name, f"message {row['no']} a dead letter of group {group}: {stand}")
            continue
        history.note(stand.queued_us, kafka.name, f"message {row['no']} in {stand}")
        if group:
            failed.append((trace, group, stand))
        elif topic not in kafka.topics:
            trace.due_us = row["due_us"] or trace.due_us
            trace.outcomes.add("COMMITTED")  # it waits for its time
        else:
            trace.stands.append(stand)
            lasts = row["expires_us"] is None or row["expires_us"] > kafka.watermark_us
            for reader in kafka.groups():
                _progress_over_kafka(kafka, trace, reader, stand, lasts=lasts)
    for trace, group, stand in failed:
        if not _is_done(kafka, group, stand):
            trace.settled.pop(group, None)  # it waits to be tried again


def _progress_over_kafka(kafka: KafkaInput, trace: Trace, group: str, stand: Stand, *, lasts: bool) -> None:
    """Note what a group has done with a message. `lasts`: it has not expired."""
    place = Place(stand.topic, stand.queue)
    progress = kafka.progress.progress[group].get(place)
    if progress is None:
        return
    if stand.offset in progress.failed:
        trace.attempts[group] = progress.failed[stand.offset]
    noted = kafka.progress.subscribed.get((group, place))
    if stand.offset >= (noted.start if noted else 0):
        trace.expected.add(group)
    number = kafka.topics.index(stand.topic)
    for left in kafka.left.get((number, stand.queue), ()):
        if left.group == group and left.holds(stand.offset, stand.queued_us):
            trace.left[group] = left, stand
    if any(first <= stand.offset < end for first, end in kafka.progress.passed.get((group, place), ())):
        trace.passed.add(group)
    if _is_done(kafka, group, stand):
        takes_all = group not in trace.left and lasts and noted is not None and not noted.filter and not noted.tags
        trace.settled[group] = Settled("ACK" if takes_all else "DONE", 0)


def _is_done(kafka: KafkaInput, group: str, stand: Stand) -> bool:
    progress = kafka.progress.progress.get(group, {}).get(Place(stand.topic, stand.queue))
    return progress is not None and (stand.offset < progress.offset or stand.offset in progress.done)


def _of_storage(storage: Database, history: History, passed_us: int) -> None:
    """`passed_us`: when a bridge of it last moved on."""
    source = f"storage {storage.name}"
    for row in storage.halves_of(ids.to_text(history.transaction)):
        trace = history.trace(row["message_no"])
        trace.half_us = microseconds_of(row["created_at"])
        trace.producer_group = trace.producer_group or row["producer_group"]
        # The log names the storage, and the half the database of the transaction.
        if origin_of(row["source"]):
            trace.source = name_hash(row["source"])
        event = f"half of message {row['message_no']} to {row['topic']} stored for {row['producer_group']}"
        history.note(trace.half_us, source, event)
        if row["decided_at"] is not None:
            decided_us = microseconds_of(row["decided_at"])
            trace.outcomes.add(row["state"])
            unmoved = unmoved_of(row | {"mode": "outbox"})
            trace.unmoved = MOVED if unmoved == WAITS and decided_us <= passed_us else unmoved
            history.note(decided_us, source, f"{row['state']} recorded")
        else:
            history.note(trace.half_us, source, f"is {row['state']}")


def _of_local_rows(database: Database, history: History) -> Iterator[Row]:
    """Note the local rows; gives the tombstones, which stand for all of their transaction."""
    source, source_id = f"database {database.name}", database.source_id()
    name = ids.to_text(history.transaction)
    for row in database.rows_of([name, name.upper()]):
        number, is_dated = row["message_no"], row["created_at"] is not None
        at_us = microseconds_of(row["created_at"]) or 1000 * ids.milliseconds(history.transaction)
        digest = row.get("digest")
        if digest is not None:
            digest = hashes.of_contents(digest, row["key"], row["tag"])
        local = Row(
            database.name, source_id, row["state"], row["topic"], digest, at_us,
            row["producer_group"], unmoved_of(row), is_dated, row["shards"],
            row["transaction_id"] != name,
        )  # fmt: skip
        if row["state"] == "ROLLED_BACK":
            history.trace(number)
            history.note(at_us, source, "tombstone: a check rolled it back")
            yield local
            continue
        trace = history.trace(number)
        trace.rows.append(local)
        trace.producer_group = trace.producer_group or row["producer_group"]
        committed = (
            "; so the transaction committed" if row["state"] == "COMMITTED" else f"; its state is {row['state']!r}"
        )
        event = (
            f"local row of message {number} to {row['topic']} written by {row['producer_group']}, mode {row['mode']}"
        )
        history.note(at_us, source, event + committed)


def _of_inbox(database: Database, history: History, numbers: Collection[int]) -> None:
    names = [ids.message_id(history.transaction, n) for n in numbers]
    for row in database.inbox_of([*names, *(name.upper() for name in names)]):
        number, group = int(row["message_id"].rpartition(".")[2]), row["consumer_group"]
        at_us = microseconds_of(row["created_at"]) or 1000 * ids.milliseconds(history.transaction)
        if not row.get("replay"):
            history.trace(number).effects.setdefault(group, []).append((database.name, at_us))
        history.note(at_us, f"database {database.name}", f"effect of message {number} in the inbox of {group}")
