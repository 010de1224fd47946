"""One transaction's whole life, from every source, in order of time. No Spark: everything is looked up by its id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify import ids
from notify.errors import InvalidRequest
from notify.spark.log_input import LogInput
from notify.spark.result import Inputs
from notify.spark.scan import ATTEMPTED
from notify.storage.groups import SettleKind
from notify.storage.sql.rows import microseconds_of


@dataclass(frozen=True)
class Event:
    """Something that happened to it: when (microseconds since 1970, by the source's clock), where, what."""

    at_us: int
    source: str
    what: str


def explain(inputs: Inputs, text: str, scratch: Path) -> list[Event]:
    """The events of a transaction in every source, the oldest first; none where nobody knows it.

    `text`: a transaction or message id. Raises InvalidRequest for anything else.
    """
    try:
        transaction, _ = ids.parse_message_id(text)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_id") from None
    name = ids.to_text(transaction)
    events: list[Event] = []
    for log in inputs.logs:
        log.prepare(None, scratch)
        events += _of_log(log, transaction)
    for kafka in inputs.kafka:
        kafka.prepare()
        events += [
            Event(row["queued_us"], f"kafka {kafka.brokers}", f"message {row['no']} in {row['place']}")
            for row in kafka.records_of(transaction)
        ]
    for storage in inputs.storages:
        for row in storage.halves_of(name):
            source = f"storage {storage.name}"
            what = f"half of message {row['message_no']} to {row['topic']} stored for {row['producer_group']}"
            events.append(Event(microseconds_of(row["created_at"]), source, what))
            if row["decided_at"] is not None:
                events.append(Event(microseconds_of(row["decided_at"]), source, f"{row['state']} recorded"))
            else:
                events.append(Event(microseconds_of(row["created_at"]), source, f"is {row['state']}"))
    numbers: set[int] = set()
    for database in inputs.databases:
        for row in database.rows_of([name]):
            numbers.add(row["message_no"])
            what = "tombstone: a check rolled it back" if row["state"] == "ROLLED_BACK" else (
                f"local row of message {row['message_no']} to {row['topic']} written by {row['producer_group']}, "
                f"mode {row['mode']}; it stands, so its transaction committed"
            )  # fmt: skip
            events.append(Event(microseconds_of(row["created_at"]), f"database {database.name}", what))
    for database in inputs.databases:
        wanted = [f"{name}.{n}" for n in range(max(numbers, default=0) + 100)]
        for row in database.inbox_of(wanted):
            what = f"effect of message {row['message_id'].rpartition('.')[2]} in the inbox of {row['consumer_group']}"
            events.append(Event(microseconds_of(row["created_at"]), f"database {database.name}", what))
    return sorted(events, key=lambda e: e.at_us)


def _of_log(log: LogInput, transaction: bytes) -> Iterator[Event]:
    found = log.entries_of(transaction)
    source = f"log {log.name}"
    catalog = log.catalog

    def place(row: dict[str, Any]) -> str:
        return f"{catalog.topics.get(row['topic'], row['topic'])}/{row['queue']}@{row['offset']}"

    for m in found["messages"]:
        number, topic = m["no"], catalog.topics.get(m["topic"], m["topic"])
        group = catalog.producer_groups.get(m["producer_group"]) or "nobody's transaction"
        if m["half_us"] is not None:
            yield Event(m["half_us"], source, f"half of message {number} to {topic} stored for {group}")
        if m["outcome"] == 2:
            yield Event(m["decided_us"], source, "ROLLED_BACK recorded")
        elif m["due_us"] is not None:
            yield Event(m["decided_us"], source, f"COMMITTED recorded; message {number} waits for its time")
        if m["offset"] is not None:
            yield Event(m["queued_us"], source, f"message {number} in queue {place(m)}")
    for c in found["checks"]:
        what = f"a check was answered, the {c['answered']}. time, and decided nothing"
        yield Event(c["at_us"], source, what + ("; PARKED" if c["parked"] else ""))
    for a in found["acks"]:
        if a["kind"] == ATTEMPTED:
            what = f"group {a['group']} is to get {place(a)} again, after attempt {a['attempts']}"
        elif a["kind"] == SettleKind.ACK:
            what = f"group {a['group']} acknowledged {place(a)}"
        else:
            what = f"group {a['group']} settled {place(a)}: {SettleKind(a['kind']).name}"
        yield Event(a["at_us"], source, what)
