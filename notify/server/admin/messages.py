"""Admin routes of messages: searches, and one message's life."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from notify import ids
from notify.errors import InvalidRequest, NotFound
from notify.limits import LIMITS, check_between
from notify.server.admin.shown import transaction_row
from notify.server.admin.writes import Desk
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.group import Group
from notify.storage.groups import SettleKind, Settlement
from notify.wire import instant, microseconds

From = Annotated[datetime | None, Query(alias="from")]
To = Annotated[datetime | None, Query(alias="to")]


def _microseconds(name: str, moment: datetime | None, otherwise: int) -> int:
    if moment is None:
        return otherwise
    try:
        return microseconds(moment)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", "invalid_query") from None


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `messages`."""

    @routes.get("/messages")
    async def messages(
        id: str | None = None,
        key: str | None = None,
        topic: str | None = None,
        since: From = None,
        until: To = None,
        max: int = 100,
    ) -> dict[str, Any]:
        """Find messages by id, by key, or of a topic by time in [from, to); the oldest of each queue first."""
        check_between("max", max, 1, 10_000)
        if id is not None:
            return {"messages": [await message(id)]}
        from_us, until_us = _microseconds("from", since, 0), _microseconds("to", until, 1 << 62)
        store = desk.core.queues
        if key is not None:
            matching = store.keyed(key, topic, from_us, until_us, max)
            # Another key may have the same hash.
            rows = [json_pulled(m) for m in matching if not m.corrupt]
            return {"messages": [row for row in rows if row.get("key") == key]}
        if topic is None:
            raise InvalidRequest("give an id, a key, or a topic (with from and to)", "invalid_query")
        rows = []
        for queue in range(desk.topic(topic).queues):
            first = store.offset_at(topic, queue, from_us)
            for m in store.read(topic, queue, first, max - len(rows), LIMITS.reply_bytes) if len(rows) < max else []:
                if m.committed_us >= until_us:
                    break
                if not m.corrupt:
                    rows.append(json_pulled(m))
        return {"messages": rows}

    @routes.get("/messages/{message_id}")
    async def message(message_id: str) -> dict[str, Any]:
        """Show a message's life: half, outcome, offset, and each group's deliveries and settlements, with times.

        An acknowledgement follows the handler's effect. `timeline_whole` is false where so much was recorded since
        that not all was read; `notify audit explain` reads everything, the effect's own row included.
        """
        return await _life(desk.core, message_id)


async def _life(core: Core, message_id: str) -> dict[str, Any]:
    """A message's life as far as this server knows it. Raises InvalidRequest, NotFound."""
    transaction_id, number = ids.parse_message_id(message_id)
    store = core.queues
    t = await store.transaction(transaction_id)
    halves = [m for m in t.messages if m.message_no == number] if t is not None else []
    if t is None or not halves:
        raise NotFound(f"no message {message_id} is known here")
    events = [(t.stored_us, {"event": "half stored" if t.producer_group else "stored"})]
    if t.decided_us:
        events.append((t.decided_us, {"event": t.state.name}))
    places = [m for m in store.messages(transaction_id) if m.message_no == number]
    for place in places:
        where = f"{place.topic}/{place.queue}@{place.offset}"
        events.append((place.committed_us, {"event": f"in queue {where}"}))
    groups: list[dict[str, Any]] = []
    whole = True
    for place in places:
        done, is_whole = await store.settlements(place.topic, place.queue, place.offset)
        whole = whole and is_whole
        events += [(s.at_us, _settled(s)) for s in done]
    for group in core.delivery.groups.values():
        for place in places:
            cursor = group.cursors.get((place.topic, place.queue))
            if cursor is not None:
                groups.append(_group_view(group, cursor, place.offset))
    return {
        "id": ids.message_id(transaction_id, number),
        "transaction": transaction_row(t, core.clock()) | {"messages": []},
        "message": json_pulled(halves[0]),
        "timeline": [{"at": instant(at)} | event for at, event in sorted(events, key=lambda e: e[0])],
        "timeline_whole": whole,
        "groups": groups,
    }


_ENDS = {
    SettleKind.ACK: "acknowledged",
    SettleKind.FILTERED: "filtered out",
    SettleKind.DEAD_LETTER: "moved to the dead letters",
    SettleKind.CORRUPT: "given up: damaged on the disk",
    SettleKind.EXPIRED: "expired",
}


def _settled(done: Settlement) -> dict[str, str]:
    what = f"attempt {done.attempts} failed" if done.kind is None else _ENDS[done.kind]
    return {"event": what, "group": done.group}


def _group_view(group: Group, cursor: Cursor, offset: int) -> dict[str, Any]:
    if cursor.progress.is_settled(offset):
        state = "settled"
    elif offset < cursor.next:
        state = "handed out"
    else:
        state = "waiting"
    view: dict[str, Any] = {"group": group.name, "topic": cursor.topic, "state": state}
    view |= {"attempts": cursor.attempts(offset), "instance": None, "until": None}
    for lease in group.leases.values():
        if lease.cursor is cursor and any(lease.offsets[n] == offset for n in lease.open):
            view |= {"instance": lease.instance.name, "until": instant(lease.deadline_us)}
    return view
