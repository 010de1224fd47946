"""One message's life as far as a server knows it: from its half to what became of it in each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from notify import ids
from notify.errors import NotFound
from notify.message import DEAD_LETTER_REASON
from notify.server.admin.shown import json_unplaced, transaction_row
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.group import Group
from notify.server.delivery.leases import Lease
from notify.server.delivery.recent import Recent
from notify.server.jobs.dead_letters import DeadLetters
from notify.storage.groups import SettleKind, Settlement
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.records import StoredMessage, Transaction
from notify.wire import decode_payload, instant

Event = tuple[int, dict[str, Any]]
"""A time in microseconds since 1970, and what happened then."""

_ENDS = {
    SettleKind.ACK: "acknowledged",
    SettleKind.FILTERED: "filtered out",
    SettleKind.DEAD_LETTER: "moved to the dead letters",
    SettleKind.CORRUPT: "given up: damaged on the disk",
    SettleKind.EXPIRED: "expired",
}


async def life(core: Core, message_id: str) -> dict[str, Any]:
    """A message's life as far as this server knows it. Raises InvalidRequest, NotFound."""
    transaction_id, number = ids.parse_message_id(message_id)
    store = core.queues
    t = await store.transaction(transaction_id)
    halves = [m for m in t.messages if m.message_no == number] if t is not None else []
    if t is None or not halves:
        raise NotFound(f"no message {message_id} is known here")
    stored = [m for m in store.messages(transaction_id) if m.message_no == number]
    letters = [m for m in stored if m.topic.startswith(DEAD_LETTER_PREFIX) and not m.corrupt]
    places = [m for m in stored if not m.topic.startswith(DEAD_LETTER_PREFIX)]
    events = list(_of_transaction(t))
    buried = {_group_of(letter) for letter in letters}
    recent = core.delivery.followers.recent
    whole = True
    for place in places:
        events.append((place.committed_us, {"event": f"in queue {place.topic}/{place.queue}@{place.offset}"}))
        done, is_whole = await store.settlements(place.topic, place.queue, place.offset)
        whole = whole and is_whole
        events += _of_deliveries(recent, place, done, buried)
    for letter in letters:
        events += await _of_letter(core, letter)
    groups: list[dict[str, Any]] = []
    for group, cursor, place in _readers(core, places):
        held = _lease_of(group, cursor, place.offset)
        if held is not None:
            handed = {"event": "handed out", "group": group.name, "instance": held[0].instance.name}
            events.append((held[0].deadline_us - held[0].length_us, handed))
        groups.append(_group_view(group, cursor, place.offset, held, core.clock()))
    return {
        "id": ids.message_id(transaction_id, number),
        "transaction": transaction_row(t, core.clock()) | {"messages": []},
        "message": json_pulled(places[0]) if places and not places[0].corrupt else json_unplaced(halves[0]),
        "timeline": [{"at": instant(at)} | event for at, event in sorted(events, key=lambda e: e[0])],
        "timeline_whole": whole,
        "consumers_known_since": instant(recent.since_us),
        "groups": groups,
    }


def _of_transaction(t: Transaction) -> Iterator[Event]:
    yield t.stored_us, {"event": "half stored" if t.producer_group else "stored"}
    if t.decided_us:
        yield t.decided_us, {"event": t.state.name}


async def _of_letter(core: Core, letter: StoredMessage) -> list[Event]:
    """When and why a group gave the message up, and when its letter was sent to it again."""
    group, headers = _group_of(letter), decode_payload(letter.payload).headers or {}
    given_up = {"event": _ENDS[SettleKind.DEAD_LETTER], "group": group, "reason": headers.get(DEAD_LETTER_REASON, "")}
    events: list[Event] = [(letter.committed_us, given_up)]
    letters = DeadLetters(core, letter.topic.removeprefix(DEAD_LETTER_PREFIX))
    again = await letters.sent_again(letter)
    if again is not None:
        (dropped,) = await letters.dropped([letter])
        sent = {"event": f"sent to the group again as {ids.message_id(again.id, 0)}", "group": group}
        if dropped is not None:
            sent = {"event": "dropped from the dead letters", "group": group, "reason": dropped}
        events.append((again.stored_us, sent))
    return events


def _group_of(letter: StoredMessage) -> str:
    """The group that gave a message up; an instance of a broadcast is one of its own."""
    headers = decode_payload(letter.payload).headers or {}
    return headers.get("notify-dead-letter-group", letter.topic.removeprefix(DEAD_LETTER_PREFIX))


def _of_deliveries(
    recent: Recent, place: StoredMessage, settlements: Sequence[Settlement], buried: set[str]
) -> list[Event]:
    """The deliveries of a message as the log has them; and, where remembered, to whom each went and why it failed.

    `buried`: groups whose dead letter is kept, which says more than the settlement.
    """
    at = (place.topic, place.queue, place.offset)
    holders = recent.holders_of(*at)
    failures = {(f.group, f.attempt): f for f in recent.failures_of(*at)}
    handed: set[tuple[int, str, str]] = set()
    ends: list[Event] = []
    given_up = set(buried)
    for s in settlements:
        event = _settled(s)
        if s.kind is None and (failed := failures.pop((s.group, s.attempts), None)) is not None:
            event |= {"instance": failed.instance, "reason": failed.reason}
            handed.add((failed.handed_us, s.group, failed.instance))
        elif s.kind == SettleKind.ACK and (holder := holders.get(s.group)) is not None:
            event["instance"] = holder.instance
            if holder.handed_us:
                handed.add((holder.handed_us, s.group, holder.instance))
        elif s.kind == SettleKind.DEAD_LETTER:
            given_up.add(s.group)
            if s.group in buried:
                continue
        ends.append((s.at_us, event))
    last = {f.group: f for f in failures.values()}
    for f in failures.values():
        handed.add((f.handed_us, f.group, f.instance))
        if f.group not in given_up or last[f.group] is not f:  # else it is why the message was given up
            event = {"event": f"attempt {f.attempt} failed", "group": f.group, "instance": f.instance}
            ends.append((f.at_us, event | {"reason": f.reason}))
    return [(at_us, {"event": "handed out", "group": g, "instance": i}) for at_us, g, i in sorted(handed)] + ends


def _settled(done: Settlement) -> dict[str, str]:
    what = f"attempt {done.attempts} failed" if done.kind is None else _ENDS[done.kind]
    return {"event": what, "group": done.group}


def _readers(core: Core, places: Sequence[StoredMessage]) -> Iterator[tuple[Group, Cursor, StoredMessage]]:
    """The groups that read a queue which the message is in."""
    for group in core.delivery.groups.values():
        for place in places:
            cursor = group.cursors.get((place.topic, place.queue))
            if cursor is not None:
                yield group, cursor, place


def _lease_of(group: Group, cursor: Cursor, offset: int) -> tuple[Lease, int] | None:
    """The lease that a message is under, and the time until which, in microseconds since 1970."""
    for lease in group.leases.values():
        if lease.cursor is cursor:
            for place in lease.open:
                if lease.offsets[place] == offset:
                    return lease, lease.extended.get(place, lease.deadline_us)
    return None


def _group_view(
    group: Group, cursor: Cursor, offset: int, held: tuple[Lease, int] | None, now_us: int
) -> dict[str, Any]:
    due_us = next((due_us for due_us, place in cursor.retries if place == offset), None)
    if held is not None:
        state = "handed out"
    elif cursor.progress.is_settled(offset):
        state = "settled"
    elif due_us is not None:
        state = "to be tried again"
    elif offset < cursor.next:
        state = "behind others of its key" if cursor.keeps_order else "to be tried again"
    else:
        state = "waiting"
    is_due = state == "to be tried again" and due_us is not None
    return {
        "group": group.name,
        "topic": cursor.topic,
        "state": state,
        "attempts": cursor.attempts(offset),
        "instance": None if held is None else held[0].instance.name,
        "until": None if held is None else instant(held[1]),
        "next_attempt_at": instant(max(due_us or 0, now_us)) if is_due else None,
    }
