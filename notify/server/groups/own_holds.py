"""The held keys of this server's own groups, for administrators. Every function raises WrongRole without queues."""

from __future__ import annotations

import heapq
from typing import Any, Literal

from notify.admin_api.held_keys import AT_ONCE, HeldChoice
from notify.errors import InvalidRequest
from notify.protocol.wire import instant
from notify.server.core.core import Core
from notify.server.delivery.group import Group
from notify.server.delivery.holds import HeldKey, HeldMessage
from notify.server.groups.own import group_of
from notify.server.letters.engine import Change

Decision = Literal["retry", "skip", "release"]


def listed(core: Core, name: str, topic: str, most: int) -> dict[str, Any]:
    """The `most` keys that a group holds the longest, of all topics or of one. Raises NotFound."""
    group = group_of(core, name)
    held = [h for h in group.holds if not topic or h.cursor.serves == topic]
    oldest = heapq.nsmallest(most, held, key=lambda h: h.hold.since_us)
    return {
        "held": [_row(group, h) for h in oldest],
        "of": len(held),
        "waiting": sum(h.cursor.waiting_for(h.offset) for h in held),
        "stopped": [f"{cursor.serves}/{cursor.queue}" for cursor in group.holds.held_up()],
    }


def decide(core: Core, name: str, decision: Decision, chosen: HeldChoice, who: str) -> Change:
    """Decide about the chosen keys. Raises NotFound, and InvalidRequest if nothing is chosen."""
    group = group_of(core, name)
    if chosen.ids is None and not (chosen.topic or chosen.key or chosen.all):
        raise InvalidRequest("say which held keys: ids, topic, key, or all", "invalid_schema")
    reason = f"{chosen.reason} (skipped by {who})" if who else f"{chosen.reason} (skipped)"

    def items(*, carries_out: bool) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        candidates = [h for h in group.holds if not chosen.topic or h.cursor.serves == chosen.topic]
        missing = dict.fromkeys(chosen.ids or ())
        looked_at = 0
        for held in candidates:
            if len(rows) >= AT_ONCE or (chosen.ids is not None and not missing):
                break
            looked_at += 1
            message = group.holds.message(held)
            is_chosen = (chosen.ids is None or message.id in missing) and chosen.key in (None, "", message.key)
            if not is_chosen:
                continue
            missing.pop(message.id, None)
            row = _item(held, message)
            if carries_out:
                _carry_out(group, held, decision, f"{reason}; the last attempt: {held.hold.reason}", core.clock())
                row |= {"status": 200}
            rows.append(row)
        left = len(candidates) - looked_at if len(rows) >= AT_ONCE else 0
        return {"items": rows + [{"id": each, "status": 404} for each in missing], "left": left}

    async def do() -> Any:
        try:
            result = items(carries_out=True)
        finally:
            core.delivery.serve(name)
        await core.queues.sync()
        return result

    return Change(items(carries_out=False), do)


def _carry_out(group: Group, held: HeldKey, decision: Decision, reason: str, now_us: int) -> None:
    if decision == "skip":
        group.holds.skip(held, reason, now_us)
    elif decision == "retry":
        group.holds.retry(held, now_us)
    else:
        group.holds.release(held, now_us)


def _item(held: HeldKey, message: HeldMessage) -> dict[str, Any]:
    cursor = held.cursor
    return {"id": message.id, "topic": cursor.serves, "key": message.key, "waiting": cursor.waiting_for(held.offset)}


def _row(group: Group, held: HeldKey) -> dict[str, Any]:
    cursor, offset = held.cursor, held.offset
    attempts, deaths = cursor.attempts(offset), cursor.deaths(offset)
    return _item(held, group.holds.message(held)) | {
        "queue": cursor.queue,
        "offset": offset,
        "since": instant(held.hold.since_us),
        "reason": held.hold.reason,
        "failures": attempts - deaths,
        "deaths": deaths,
    }
