"""Looks up the present effects, local rows and places in queues of messages by id, without Spark."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from notify.errors import Unavailable
from notify.protocol import ids
from notify.protocol.wire import instant
from notify.spark.checks.outbox_waiting import MOVED, WHY, unmoved_of
from notify.spark.inputs.changes import END
from notify.spark.inputs.databases import ODD, Database
from notify.spark.inputs.effects import UNNAMED, BusinessEffects, proven_of
from notify.spark.inputs.log_input import LogInput
from notify.storage.sql.rows import microseconds_of

AT_ONCE = 500
"""Ids in one query, and messages in one request."""


def parts(values: Iterable[Any], most: int = AT_ONCE) -> Iterator[list[Any]]:
    """Values in lists of at most `most`."""
    rest = iter(values)
    while part := list(islice(rest, most)):
        yield part


@dataclass(frozen=True, slots=True)
class Effects:
    """The consumer groups in which a message took effect: by its inbox rows, and by the queries of --effects."""

    inboxes: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inboxes or self.proven)

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.inboxes | other.inboxes, self.proven | other.proven)

    @property
    def groups(self) -> frozenset[str]:
        """The known groups among these."""
        return (self.inboxes | self.proven) - {UNNAMED}

    @property
    def unguarded(self) -> frozenset[str]:
        """The groups whose inbox would not skip the message, and UNNAMED where the group is not known."""
        return self.proven - self.inboxes

    @property
    def listed(self) -> str:
        """The groups in words; "" if there is none."""
        named = sorted(self.inboxes | self.proven - {UNNAMED})
        return ", ".join([*named, "a group that --effects does not name"] if UNNAMED in self.proven else named)

    def __str__(self) -> str:
        by = ", as --effects shows" if self.unguarded else ""
        return f"it took effect in {self.listed}{by}"

    def why_not_to(self, group: str) -> str:
        """Why the message is not sent to a group again; "" if nothing shows an effect there."""
        if group in self.inboxes:
            return f"it took effect in {group} by now: the inbox has its row"
        if group in self.proven:
            return f"it took effect in {group}, as --effects shows: only the row of the inbox is gone"
        if UNNAMED in self.proven:
            return (
                "it took effect, as --effects shows, and the query does not say in which group that is known: return "
                "its name as consumer_group"
            )
        return ""


NONE = Effects()


def effects_of(
    databases: Sequence[Database],
    message_ids: Iterable[str],
    queries: Sequence[BusinessEffects],
    known_groups: Collection[str] = (),
) -> dict[str, Effects]:
    """The effects of messages in any of the databases; nothing for a message without one.

    `known_groups`: a query that names a group beyond these may mean any; none: all are taken as they are."""
    effects: dict[str, Effects] = {}
    for part in parts(dict.fromkeys(message_ids)):
        for database in databases:
            for row in database.inbox_of(part):
                name = row["message_id"]
                effects[name] = effects.get(name, NONE) | Effects(frozenset([row["consumer_group"]]))
        for name, groups in proven_of(queries, part).items():
            meant = {group if not known_groups or group in known_groups else UNNAMED for group in groups}
            effects[name] = effects.get(name, NONE) | Effects(proven=frozenset(meant))
    return effects


@dataclass(frozen=True, slots=True)
class LocalRow:
    """`message`: the message's fields as the server takes them; empty where the row has no body. `unmoved`: see
    spark.checks.outbox_waiting."""

    state: str
    message: dict[str, Any]
    unmoved: int = MOVED
    due_us: int = 0
    """When it may be delivered, in microseconds since 1970: its own time, or that of the row."""
    expires_us: int = 0
    """When it expires; 0: never."""
    odd: str = ""
    """The column with a value that no version writes; "" if there is none."""

    def at(self, now_us: int) -> dict[str, Any]:
        """The message to send at an instant: with the rest of its delay and of its time to live."""
        fields = {name: value for name, value in self.message.items() if name not in ("delay", "deliver_at", "ttl")}
        if self.due_us > now_us:
            fields["deliver_at"] = instant(self.due_us)
        if self.expires_us:
            fields["ttl"] = (self.expires_us - max(now_us, self.due_us)) / 1e6
        return fields

    @property
    def digest(self) -> str:
        """A digest of the message; empty where there is none."""
        if not self.message:
            return ""
        return hashlib.sha256(msgspec.json.encode(self.message, order="sorted")).hexdigest()


def rows_of(databases: Sequence[Database], message_ids: Iterable[str]) -> dict[str, list[LocalRow]]:
    """The local rows of messages, of every database that has one. A tombstone stands for all of its transaction."""
    rows: dict[str, list[LocalRow]] = {}
    for part in parts(dict.fromkeys(message_ids)):
        wanted = {name: name.partition(".")[0] for name in part}
        for database in databases:
            known: dict[str, list[dict[str, Any]]] = {}
            for row in database.rows_of(sorted(set(wanted.values()))):
                known.setdefault(row["transaction_id"], []).append(row)
            for name, transaction in wanted.items():
                for row in known.get(transaction, ()):
                    if row["state"] == "ROLLED_BACK" or f"{transaction}.{row['message_no']}" == name:
                        rows.setdefault(name, []).append(_local_row(row))
    return rows


def why_unmoved(rows: Iterable[LocalRow]) -> str:
    """Why a message is not sent again: its mover still will, or a person decides or has decided; "" otherwise."""
    return next((WHY[row.unmoved] for row in rows if row.unmoved != MOVED), "")


def why_malformed(rows: Iterable[LocalRow]) -> str:
    """Why a message is not sent again from its local row; "" if it may be."""
    return next((f"its local row is malformed: its {row.odd} is none" for row in rows if row.odd), "")


def why_expired(rows: Iterable[LocalRow], now_us: int) -> str:
    """Why an expired message is not sent again; "" if it has not expired."""
    ended_us = next((row.expires_us for row in rows if row.expires_us and row.expires_us <= now_us), 0)
    return f"it expired at {instant(ended_us)}, by its ttl" if ended_us else ""


def _local_row(row: dict[str, Any]) -> LocalRow:
    odd = next(iter(row.get(ODD, ())), "")
    try:
        message = _message_of(row)
    except ValueError:
        message, odd = {}, "headers"
    due_us = microseconds_of(row["created_at"])
    if row["deliver_at"] is not None:
        due_us = microseconds_of(row["deliver_at"])
    elif row["delay"]:
        due_us += round(row["delay"] * 1e6)
    expires_us = due_us + round(row["ttl"] * 1e6) if row["ttl"] else 0
    return LocalRow(row["state"], message, unmoved_of(row), due_us, expires_us, odd)


def _message_of(row: dict[str, Any]) -> dict[str, Any]:
    if row["body"] is None:
        return {}
    fields = {
        "topic": row["topic"],
        "body_base64": base64.b64encode(row["body"]).decode(),
        "key": row["key"],
        "tag": row["tag"],
        "headers": json.loads(row["headers"]) if row["headers"] else None,
        "delay": row["delay"],
        "deliver_at": None if row["deliver_at"] is None else str(row["deliver_at"]),
        "ttl": row["ttl"],
    }
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Places:
    """Message ids: in queues, waiting for their time, and undecided."""

    queued: frozenset[str]
    waiting: frozenset[str]
    undecided: frozenset[str]
    from_us: int = 0
    """Retention dropped older records than this, in microseconds since 1970; 0: none."""
    until_us: int = END
    """A store may lack newer records than this."""


def unread_of(logs: Iterable[LogInput]) -> list[str]:
    """The parts of logs that are missing or cannot be read."""
    return [f"log {log.name}: {part}" for log in logs if log.facts for part in log.unread(0)]


def places_of(
    logs: Sequence[LogInput], message_ids: Iterable[str], scratch: Path | str, known_unread: Collection[str] = ()
) -> Places:
    """The places of messages in the present logs. Raises Unavailable if a log has unreadable parts other than
    `known_unread`, which the plan knew of."""
    wanted = sorted({ids.from_text(name.partition(".")[0]) for name in message_ids})
    queued: set[str] = set()
    waiting: set[str] = set()
    halves: set[str] = set()
    from_us, until_us = 0, END
    decided: set[bytes] = set()
    """Transactions: the outcome may be in another segment than the halves, as one row for all messages."""
    for known in logs if wanted else ():
        log = LogInput(known.files.place, known.name)  # its segments as they are now
        log.prepare(None, scratch)
        if log.problems:
            raise Unavailable(f"nothing is repaired while log {log.name} is incomplete: {log.problems[0]}")
        if gone := sorted(set(unread_of([log])) - set(known_unread)):
            raise Unavailable(f"nothing is repaired while more of a log is missing than when it was planned: {gone[0]}")
        from_us = max(from_us, log.first_us)
        if log.is_shipped:
            until_us = min(until_us, log.watermark_us)
        for row in log.messages_of(wanted):
            name = ids.message_id(row["id"], row["no"])
            if row["offset"] is not None:
                queued.add(name)
            elif row["outcome"] == 1 and row["due_us"] is not None:
                waiting.add(name)
            if row["outcome"]:
                decided.add(row["id"])
            else:
                halves.add(name)
    undecided = {name for name in halves - queued if ids.from_text(name.partition(".")[0]) not in decided}
    return Places(frozenset(queued), frozenset(waiting - queued), frozenset(undecided), from_us, until_us)
