"""One message's life as a server knows it: from its half to its state in each consumer group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from notify.errors import NotFound
from notify.protocol import ids
from notify.protocol.message import DEAD_LETTER_REASON, FIRST_ID, schedule_of
from notify.protocol.wire import decode_payload, instant
from notify.server.admin.representations import json_unplaced, transaction_row
from notify.server.core.check_log import ASKED
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.server.delivery.ack_memory import AckMemory
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.group import Group
from notify.server.delivery.leases import Lease
from notify.server.groups.own_letters import OwnLetters
from notify.storage.groups import SettleKind, Settlement
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.records import StoredMessage, Transaction
from notify.storage.withdrawals import Standing, Withdrawable

Event = tuple[int, dict[str, Any]]
"""A time in microseconds since 1970, and the event at that time."""

_ENDS = {
    SettleKind.ACK: ("acknowledged", "acknowledged"),
    SettleKind.FILTERED: ("filtered", "filtered out"),
    SettleKind.DEAD_LETTER: ("dead_letter", "moved to the dead letters"),
    SettleKind.CORRUPT: ("damaged", "given up: damaged on the disk"),
    SettleKind.EXPIRED: ("expired", "expired"),
}
"""How a group is done with a message: the kind of the event, and its words."""


async def timeline(core: Core, message_id: str) -> dict[str, Any]:
    """A message's life as this server knows it. Raises InvalidRequest, NotFound."""
    transaction_id, number = ids.parse_message_id(message_id)
    store = core.queues
    transaction = await store.transaction(transaction_id)
    halves = [m for m in transaction.messages if m.message_no == number] if transaction is not None else []
    if transaction is None or not halves:
        raise NotFound(f"this server knows no message {message_id}")
    stored = [m for m in store.messages(transaction_id) if m.message_no == number]
    letters = [m for m in stored if m.topic.startswith(DEAD_LETTER_PREFIX) and not m.corrupt]
    places = [m for m in stored if not m.topic.startswith(DEAD_LETTER_PREFIX)]
    withdrawable = store.withdrawable(transaction_id, number)
    half = halves[0]
    headers = {} if half.corrupt or not half.payload else decode_payload(half.payload).headers or {}
    events = [
        *_transaction_events(transaction, schedule_of(headers)),
        *_check_events(core, transaction_id),
        *_withdrawal_events(core, transaction_id, number, withdrawable),
    ]
    groups_with_letter = {_group_of(letter) for letter in letters}
    recent = core.delivery.followers.recent
    is_timeline_whole = True
    for place in places:
        in_queue = {"kind": "queued", "event": f"in queue {place.topic}/{place.queue}@{place.offset}"}
        events.append((place.committed_us, in_queue))
        settlements, is_whole = await store.settlements(place.topic, place.queue, place.offset)
        is_timeline_whole = is_timeline_whole and is_whole
        events += _delivery_events(recent, place, settlements, groups_with_letter)
    for letter in letters:
        events += await _letter_events(core, letter, _trace_of_last(recent, places, _group_of(letter)))
    groups: list[dict[str, Any]] = []
    for group, cursor, place in _readers(core, places):
        leased = _lease_of(group, cursor, place.offset)
        if leased is not None:
            handed_us = leased[0].deadline_us - leased[0].length_us
            events.append((handed_us, _handed_out(group.name, leased[0].instance.name)))
        groups.append(_group_view(group, cursor, place.offset, leased, core.clock()))
    return {
        "at": instant(core.clock()),
        "id": ids.message_id(transaction_id, number),
        "transaction": transaction_row(transaction, core.clock()) | {"messages": []},
        "message": json_pulled(places[0]) if places and not places[0].corrupt else json_unplaced(halves[0]),
        "timeline": [{"at": instant(at)} | event for at, event in sorted(events, key=lambda e: e[0])],
        "timeline_whole": is_timeline_whole,
        "consumers_known_since": instant(recent.since_us),
        "groups": groups,
    } | _only_some_have(headers, withdrawable)


def _only_some_have(headers: Mapping[str, str], found: Withdrawable | None) -> dict[str, Any]:
    """When a delayed message is due, and the first id of one that was sent to a group again."""
    is_delayed = found is not None and found.standing is Standing.DELAYED
    due = {"due_at": instant(found.due_us)} if found is not None and is_delayed else {}
    return due | ({"first_id": headers[FIRST_ID]} if FIRST_ID in headers else {})


def _transaction_events(transaction: Transaction, schedule: str) -> Iterator[Event]:
    event = "half stored" if transaction.producer_group else "stored"
    yield transaction.stored_us, {"kind": "stored", "event": f"sent by schedule {schedule}" if schedule else event}
    if transaction.decided_us:
        yield transaction.decided_us, {"kind": "outcome", "event": transaction.state.name}


def _check_events(core: Core, transaction_id: bytes) -> Iterator[Event]:
    """The checks that this server remembers: which producer was asked, and what it answered."""
    for entry in core.checks.log.of(transaction_id):
        if entry.what == ASKED:
            words = f"{entry.instance} was asked whether it committed"
        else:
            words = f"check answered {entry.what}"
        yield entry.at_us, {"kind": "check", "event": words} | ({"reason": entry.reason} if entry.reason else {})


def _withdrawal_events(
    core: Core, transaction_id: bytes, number: int, withdrawable: Withdrawable | None
) -> Iterator[Event]:
    """The withdrawal of a message, or its fate as a withdrawal of another one."""
    withdrawal = core.queues.withdrawal(transaction_id, number, core.clock())
    if withdrawal is not None and withdrawal.fate is not None:
        verb = "replaces" if withdrawal.wanted.replaces else "cancels"
        event = f"{verb} {withdrawal.wanted.text}: {withdrawal.fate.name}"
        yield withdrawal.at_us, {"kind": "withdrawal", "event": event}
    if withdrawable is not None and withdrawable.at_us:
        yield withdrawable.at_us, {"kind": "withdrawal", "event": withdrawable.standing.value}


async def _letter_events(core: Core, letter: StoredMessage, trace: str) -> list[Event]:
    """When and why a group gave the message up, and when the dead letter was sent again or dropped. `trace`: the
    traceback of the last attempt, if it is known."""
    group, headers = _group_of(letter), decode_payload(letter.payload).headers or {}
    kind, words = _ENDS[SettleKind.DEAD_LETTER]
    given_up = {"kind": kind, "event": words, "group": group, "reason": headers.get(DEAD_LETTER_REASON, "")}
    events: list[Event] = [(letter.committed_us, given_up | _traced(trace))]
    closed_by = await OwnLetters(core).closed_by(letter.topic.removeprefix(DEAD_LETTER_PREFIX), letter)
    if closed_by is not None:
        redriven, drop_reason = closed_by
        new_id = ids.message_id(redriven.id, 0)
        event = {"kind": "redriven", "event": f"sent to the group again as {new_id}", "group": group, "as": new_id}
        if drop_reason is not None:
            words = "dropped from the dead letters"
            event = {"kind": "dropped", "event": words, "group": group, "reason": drop_reason}
        events.append((redriven.stored_us, event))
    return events


def _trace_of_last(recent: AckMemory, places: Sequence[StoredMessage], group: str) -> str:
    """The traceback of the last attempt of a group that gave the message up; empty if it is not known."""
    failures = [failure for p in places for failure in recent.failures_of(p.topic, p.queue, p.offset)]
    return next((failure.trace for failure in reversed(failures) if failure.group == group), "")


def _traced(trace: str) -> dict[str, Any]:
    return {"trace": trace} if trace else {}


def _handed_out(group: str, instance: str) -> dict[str, Any]:
    return {"kind": "handed_out", "event": "handed out", "group": group, "instance": instance}


def _group_of(letter: StoredMessage) -> str:
    """The group that gave a message up; each instance of a broadcast group counts as a group."""
    headers = decode_payload(letter.payload).headers or {}
    return headers.get("notify-dead-letter-group", letter.topic.removeprefix(DEAD_LETTER_PREFIX))


def _delivery_events(
    recent: AckMemory, place: StoredMessage, settlements: Sequence[Settlement], groups_with_letter: set[str]
) -> list[Event]:
    """The deliveries of a message from the log; and from `recent` their instances, and why they failed.

    `groups_with_letter`: groups that still have the dead letter, which says more than the settlement.
    """
    at = (place.topic, place.queue, place.offset)
    holders = recent.holders_of(*at)
    failures = {(f.group, f.attempt, f.interruptions): f for f in recent.failures_of(*at)}
    handed_out: set[tuple[int, str, str]] = set()
    ends: list[Event] = []
    given_up = set(groups_with_letter)
    before: dict[str, Settlement] = {}
    for settlement in settlements:
        group, event = settlement.group, _settlement_event(settlement, before.get(settlement.group))
        before[group] = settlement
        key = (group, settlement.attempts, settlement.interruptions)
        if settlement.kind is None and (failure := failures.pop(key, None)) is not None:
            event |= {"instance": failure.instance, "reason": failure.reason} | _traced(failure.trace)
            handed_out.add((failure.handed_us, group, failure.instance))
        elif settlement.kind == SettleKind.ACK and (holder := holders.get(group)) is not None:
            event["instance"] = holder.instance
            if holder.handed_us:
                handed_out.add((holder.handed_us, group, holder.instance))
        elif settlement.kind == SettleKind.DEAD_LETTER:
            given_up.add(group)
            if group in groups_with_letter:
                continue
        ends.append((settlement.at_us, event))
    last = {failure.group: failure for failure in failures.values()}
    for failure in failures.values():
        handed_out.add((failure.handed_us, failure.group, failure.instance))
        is_final = failure.group in given_up and last[failure.group] is failure  # the dead letter has its reason
        if not is_final:
            event = {
                "kind": "failed",
                "event": f"attempt {failure.attempt} failed",
                "group": failure.group,
                "instance": failure.instance,
                "reason": failure.reason,
            } | _traced(failure.trace)
            ends.append((failure.at_us, event))
    return [(at_us, _handed_out(g, i)) for at_us, g, i in sorted(handed_out)] + ends


def _settlement_event(settlement: Settlement, before: Settlement | None) -> dict[str, Any]:
    """`before`: the group's settlement before this one."""
    if settlement.kind is not None:
        kind, event = _ENDS[settlement.kind]
    elif settlement.interruptions > (0 if before is None else before.interruptions):
        kind, event = "interrupted", "interrupted, because its consumer was stopping"
    elif settlement.deaths > (0 if before is None else before.deaths):
        kind, event = "died", f"attempt {settlement.attempts} ended with its consumer"
    else:
        kind, event = "failed", f"attempt {settlement.attempts} failed"
    if settlement.is_held:
        event += ", and its key is held"
    return {"kind": kind, "event": event, "group": settlement.group}


def _readers(core: Core, places: Sequence[StoredMessage]) -> Iterator[tuple[Group, Cursor, StoredMessage]]:
    """The groups that read a queue of the message, each with its cursor and the message's place there."""
    for group in core.delivery.groups.values():
        for place in places:
            cursor = group.cursors.get((place.topic, place.queue))
            if cursor is not None:
                yield group, cursor, place


def _lease_of(group: Group, cursor: Cursor, offset: int) -> tuple[Lease, int] | None:
    """The lease that holds a message, and the time when it ends, in microseconds since 1970."""
    for lease in group.leases.values():
        if lease.cursor is cursor:
            for index in lease.open:
                if lease.offsets[index] == offset:
                    return lease, lease.extended.get(index, lease.deadline_us)
    return None


def _group_view(
    group: Group, cursor: Cursor, offset: int, leased: tuple[Lease, int] | None, now_us: int
) -> dict[str, Any]:
    due_us = next((due_us for due_us, retry_offset in cursor.retries if retry_offset == offset), None)
    if leased is not None:
        state = "handed out"
    elif cursor.progress.is_settled(offset):
        state = "settled"
    elif due_us is not None:
        state = "to be tried again"
    elif cursor.looks_ahead:
        state = "to be tried again" if cursor.attempts(offset) else "waiting"
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
        "deaths": cursor.deaths(offset),
        "interruptions": cursor.interruptions(offset),
        "instance": None if leased is None else leased[0].instance.name,
        "until": None if leased is None else instant(leased[1]),
        "next_attempt_at": instant(max(due_us or 0, now_us)) if is_due else None,
    }
