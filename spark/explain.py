"""The history of one transaction from every source, in order of time. It needs no Spark, only lookups by id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify import ids
from notify.spark.columns import ATTEMPTED
from notify.spark.log_input import LogInput
from notify.spark.result import Inputs
from notify.storage.groups import SettleKind
from notify.storage.sql.rows import microseconds_of


@dataclass(frozen=True)
class Event:
    """One event: when (microseconds since 1970, by the source's clock), where, and what happened."""

    at_us: int
    source: str
    what: str


def explain(inputs: Inputs, text: str, scratch: Path) -> list[Event]:
    """The events of a transaction in every source, the oldest first; empty if no source knows it.

    `text`: a transaction or message id. Raises InvalidRequest for anything else.
    """
    transaction, _ = ids.parse_message_id(text)
    name = ids.to_text(transaction)
    events: list[Event] = []
    for log in inputs.logs:
        log.prepare(None, scratch)
        events += _of_log(log, transaction)
    for kafka in inputs.kafka:
        kafka.prepare()
        events += [
            Event(row["queued_us"], kafka.name, f"message {row['no']} in {row['place']}")
            for row in kafka.records_of(transaction)
        ]
    for storage in inputs.storages:
        for row in storage.halves_of(name):
            source = f"storage {storage.name}"
            event = f"half of message {row['message_no']} to {row['topic']} stored for {row['producer_group']}"
            events.append(Event(microseconds_of(row["created_at"]), source, event))
            if row["decided_at"] is not None:
                events.append(Event(microseconds_of(row["decided_at"]), source, f"{row['state']} recorded"))
            else:
                events.append(Event(microseconds_of(row["created_at"]), source, f"is {row['state']}"))
    numbers: set[int] = set()
    for database in inputs.databases:
        for row in database.rows_of([name]):
            numbers.add(row["message_no"])
            event = "tombstone: a check rolled it back" if row["state"] == "ROLLED_BACK" else (
                f"local row of message {row['message_no']} to {row['topic']} written by {row['producer_group']}, "
                f"mode {row['mode']}; so the transaction committed"
            )  # fmt: skip
            events.append(Event(microseconds_of(row["created_at"]), f"database {database.name}", event))
    for database in inputs.databases:
        wanted = [f"{name}.{n}" for n in range(max(numbers, default=0) + 100)]
        for row in database.inbox_of(wanted):
            event = f"effect of message {row['message_id'].rpartition('.')[2]} in the inbox of {row['consumer_group']}"
            events.append(Event(microseconds_of(row["created_at"]), f"database {database.name}", event))
    return sorted(events, key=lambda e: e.at_us)


def _of_log(log: LogInput, transaction: bytes) -> Iterator[Event]:
    rows = log.entries_of(transaction)
    source = f"log {log.name}"
    catalog = log.catalog

    def place(row: dict[str, Any]) -> str:
        return f"{catalog.topics.get(row['topic'], row['topic'])}/{row['queue']}@{row['offset']}"

    for m in rows["messages"]:
        number, topic = m["no"], catalog.topics.get(m["topic"], m["topic"])
        group = catalog.producer_groups.get(m["producer_group"]) or "no transaction"
        if m["half_us"] is not None:
            yield Event(m["half_us"], source, f"half of message {number} to {topic} stored for {group}")
        if m["outcome"] == 2:
            yield Event(m["decided_us"], source, "ROLLED_BACK recorded")
        elif m["due_us"] is not None:
            yield Event(m["decided_us"], source, f"COMMITTED recorded; message {number} waits for its time")
        if m["offset"] is not None:
            yield Event(m["queued_us"], source, f"message {number} in queue {place(m)}")
    for c in rows["checks"]:
        event = f"check {c['answered']} was answered, and left the transaction undecided"
        yield Event(c["at_us"], source, event + ("; PARKED" if c["parked"] else ""))
    for a in rows["acks"]:
        if a["kind"] == ATTEMPTED:
            event = f"group {a['group']} will receive {place(a)} again, after attempt {a['attempts']}"
        elif a["kind"] == SettleKind.ACK:
            event = f"group {a['group']} acknowledged {place(a)}"
        else:
            event = f"group {a['group']} settled {place(a)}: {SettleKind(a['kind']).name}"
        yield Event(a["at_us"], source, event)
