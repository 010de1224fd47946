"""Admin routes that cancel or replace a delayed message."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from notify.admin_api.declaration import Write
from notify.admin_api.messages import ReplaceDelayed
from notify.errors import InvalidRequest, NotFound
from notify.protocol import ids
from notify.protocol.large_bodies import plain_headers
from notify.protocol.wire import JsonMessages, JsonPublished, body_fields, decode_payload, instant
from notify.protocol.withdrawal import CANCELS, REPLACES, without_own
from notify.server.admin.writes import Desk, Who
from notify.server.core.admission import new_messages
from notify.storage.withdrawals import Withdrawable


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `topics/{name}/messages/{message_id}/cancel` and `…/replace`."""

    @routes.post("/topics/{name}/messages/{message_id}/cancel")
    async def cancel(name: str, message_id: str, write: Write, who: Who) -> dict[str, Any]:
        """Cancel a delayed message: if it is not due yet, it is never delivered. The preview says when it is due."""
        found, full_id = _found(desk, name, message_id)
        message = JsonPublished(topic=name, body="", headers={CANCELS: full_id})
        return await _carried_out(desk, write, who, "message.cancel", full_id, found, message)

    @routes.post("/topics/{name}/messages/{message_id}/replace")
    async def replace(name: str, message_id: str, write: ReplaceDelayed, who: Who) -> dict[str, Any]:
        """Replace a delayed message by one with another body, or due at another time: one of the two is delivered."""
        found, full_id = _found(desk, name, message_id)
        message = await _replacement(desk, name, full_id, found, write)
        return await _carried_out(desk, write, who, "message.replace", full_id, found, message)


def _found(desk: Desk, topic: str, message_id: str) -> tuple[Withdrawable, str]:
    """Where a message of the topic stands, and its whole id. Raises NotFound."""
    transaction_id, number = ids.parse_message_id(message_id)
    found = desk.running.core.queues.withdrawable(transaction_id, number)
    if found is None or found.topic != topic:
        raise NotFound(f"topic {topic[:100]!r} has no message {message_id[:60]}")
    return found, ids.message_id(transaction_id, number)


async def _replacement(
    desk: Desk, topic: str, message_id: str, found: Withdrawable, write: ReplaceDelayed
) -> JsonPublished:
    transaction_id, number = ids.parse_message_id(message_id)
    transaction = await desk.running.core.queues.transaction(transaction_id)
    stored = [m for m in transaction.messages if m.message_no == number] if transaction is not None else []
    if not stored or stored[0].corrupt:
        raise NotFound(f"the content of message {message_id} is no longer retained")
    content = decode_payload(stored[0].payload)
    headers = dict(without_own(content.headers or {}))
    if write.body is not None:  # it stands in the message itself, as it is
        headers = plain_headers(headers)
    message = JsonPublished(
        topic=topic,
        key=content.key,
        tag=content.tag,
        headers=headers | {REPLACES: message_id},
        ttl=content.ttl,
        delay=write.delay,
        **(body_fields(content.body) if write.body is None else {"body": write.body}),
    )
    if write.delay is None and found.due_us:
        seconds, rest = divmod(found.due_us, 1_000_000)
        message.deliver_at = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    return message


async def _carried_out(
    desk: Desk, write: Write, who: str, what: str, message_id: str, found: Withdrawable, message: JsonPublished
) -> dict[str, Any]:
    core = desk.running.core
    message.id = ids.message_id(ids.new_id(), 0)
    new_messages([message], core.clock(), lambda _: True, lambda _: None)  # raises what publishing raises
    preview = {
        "standing": found.standing.value,
        "due_at": instant(found.due_us) if found.due_us else None,
        "withdrawn_at": instant(found.at_us) if found.at_us else None,
    }

    async def do() -> dict[str, Any]:
        (item,) = await core.transactions.publish(JsonMessages(messages=[message]), anywhere=True)
        if item.status not in (200, 201):
            raise InvalidRequest(item.detail or "the server refused it", item.code or "refused", item.status)
        became = core.queues.withdrawal(*ids.parse_message_id(item.id), core.clock())
        fate = "NOT_FOUND" if became is None or became.fate is None else became.fate.name
        by = {"replacement": item.id} if what == "message.replace" else {}
        return {"outcome": fate, "due_at": preview["due_at"]} | by

    return await desk.carry_out(write, who, what, message_id, do, preview)
