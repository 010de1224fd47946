"""Admin routes that repair an audit's findings: messages missing in their queue, effects that never happened.

A message that is sent again gets an id derived from its own id. So repeating a repair changes nothing, and the next
audit sees that the message was repaired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter

from notify.admin_api.dead_letters import Redeliver
from notify.admin_api.server import Lost, Republish
from notify.errors import Conflict, InvalidRequest, NotFound, NotifyError
from notify.protocol import ids
from notify.protocol.message import FIRST_ID
from notify.protocol.wire import PackedMessages, PackedPublished, decode_payload
from notify.protocol.withdrawal import DEDUPE, KEEP, REPLACES, Fate, wanted_of, without_own
from notify.server.admin.writes import Desk, Who
from notify.server.core.core import Core
from notify.server.delivery.inboxes import refuse_before
from notify.server.groups.sending_again import send_to_group
from notify.storage.groups import Subscription
from notify.storage.queues import Store
from notify.storage.records import State, StoredMessage
from notify.storage.withdrawals import Standing


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `messages/republish` and `groups/{name}/redeliver`."""
    _republishing(routes, desk)
    _redelivering(routes, desk)


def _republishing(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/messages/republish")
    async def republish(write: Republish, who: Who) -> dict[str, Any]:
        """Publish committed messages that are in no queue; a repeated call publishes each message once."""
        items: list[dict[str, Any]] = []
        ready: list[PackedPublished] = []
        for lost in write.messages:
            item: dict[str, Any] = {"id": lost.id}
            try:
                message = await _published(desk.running.core, lost)
            except NotifyError as error:
                item |= _refused(error)
            else:
                item |= {"as": message.id, "topic": message.topic}
                ready.append(message)
            items.append(item)

        async def do() -> Any:
            messages = PackedMessages(messages=ready)
            results = iter(await desk.running.core.transactions.publish(messages, anywhere=True) if ready else [])
            for item in items:
                if "status" not in item:
                    result = next(results)
                    item["status"] = result.status
                    if result.code:
                        item |= {"code": result.code, "detail": result.detail}
            return {"items": items}

        return await desk.carry_out(write, who, "message.republish", "messages", do, {"items": items})


def _redelivering(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/redeliver")
    async def redeliver(name: str, write: Redeliver, who: Who) -> dict[str, Any]:
        """Send messages of queues to one group again; a repeated call sends each message once."""
        queues = desk.running.core.queues
        items: list[dict[str, Any]] = []
        ready: list[tuple[StoredMessage, bytes]] = []
        for message_id in write.ids:
            item: dict[str, Any] = {"id": message_id}
            try:
                message, subscription = _in_a_queue(queues, name, message_id)
                if not write.force:
                    refuse_before(subscription, [message.committed_us])
                new_id = ids.derived(message.transaction_id, ids.redelivered(name, message.message_no))
            except NotifyError as error:
                item |= _refused(error)
            else:
                item |= {"as": ids.message_id(new_id, 0), "topic": message.topic}
                ready.append((message, new_id))
            items.append(item)

        async def do() -> Any:
            # The checks above cover what `force` allows.
            results = iter(await send_to_group(desk.running.core, name, ready, force=True))
            for item in items:
                if "status" not in item:
                    item |= next(results)
            return {"items": items}

        return await desk.carry_out(write, who, "message.redeliver", name, do, {"items": items})


async def _half_of(core: Core, transaction: bytes, number: int) -> tuple[StoredMessage, int]:
    """The message in its half, and when its transaction was decided (microseconds since 1970). Raises NotFound."""
    stored = await core.store.transaction(transaction)
    messages = [m for m in stored.messages if m.message_no == number and not m.corrupt] if stored is not None else []
    if not messages:
        raise NotFound("the server has no readable half of this message: give topic and body_base64")
    assert stored is not None
    return messages[0], stored.decided_us or stored.stored_us


async def _published(core: Core, lost: Lost) -> PackedPublished:
    """The message to publish instead of a lost one.

    Its consumers also see the first id: an inbox that has the effect under that id skips the message. Raises
    InvalidRequest and NotFound; Conflict if the message is in a queue here, or has no outcome yet.
    """
    transaction, number = ids.parse_message_id(lost.id)
    await _check_lost(core, transaction, number)
    new_id = ids.message_id(ids.derived(transaction, ids.republished(number)), 0)
    first = {FIRST_ID: ids.message_id(transaction, number)}
    if lost.topic is not None:
        fields = lost.given("id")
        headers = _without_acts(core, transaction, number, lost.headers or {})
        return msgspec.convert(fields | {"id": new_id, "headers": headers | first}, PackedPublished)
    half, committed_us = await _half_of(core, transaction, number)
    payload = decode_payload(half.payload)
    headers, ttl = _without_acts(core, transaction, number, payload.headers or {}) | first, payload.ttl
    if ttl is not None and lost.deliver_at is None:
        ttl -= (core.clock() - committed_us) / 1e6
        if ttl <= 0:
            raise Conflict("the message has expired: its ttl is over", "expired")
    return PackedPublished(
        id=new_id,
        topic=payload.topic,
        body=payload.body,
        key=payload.key,
        tag=payload.tag,
        headers=headers,
        deliver_at=lost.deliver_at,
        ttl=ttl,
    )


def _without_acts(core: Core, transaction: bytes, number: int, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a lost message without those that did their work when it was committed.

    Raises InvalidRequest if it is a replacement that did not, and could not any more: it would not be delivered.
    """
    kept = {name: value for name, value in headers.items() if name not in (DEDUPE, KEEP)}
    wanted = wanted_of(kept)
    if wanted is None or not wanted.replaces:
        return kept
    own = core.queues.withdrawal(transaction, number, core.clock())
    if own is not None and own.fate is Fate.WITHDRAWN:
        return dict(without_own(kept))
    found = core.queues.withdrawable(wanted.id, wanted.number)
    if found is None or found.standing is not Standing.DELAYED:
        standing = "unknown here" if found is None else found.standing.value
        raise InvalidRequest(
            f"it replaces {wanted.text}, which is {standing}, so that it would not be delivered: if it should be, send "
            f"it without the header {REPLACES}",
            "withdrawal_refused",
        )
    return kept


async def _check_lost(core: Core, transaction: bytes, number: int) -> None:
    """Raises Conflict if the message is in a queue of this server, or its transaction is not decided yet."""
    for message in core.queues.messages(transaction):
        if message.message_no == number:
            raise Conflict(f"it is in a queue: {message.topic}/{message.queue}@{message.offset}", "in_a_queue")
    stored = await core.store.transaction(transaction)
    if stored is not None and stored.state in (State.PREPARED, State.PARKED):
        raise Conflict(f"it is {stored.state.name}: check it, or decide it first", "in_doubt")


def _in_a_queue(store: Store, group: str, message_id: str) -> tuple[StoredMessage, Subscription]:
    """The message in the topic that it was sent to, and the group's subscription to that topic.

    Raises NotFound. Its text does not say whether another topic has the message: an administrator of one group may not
    see every topic.
    """
    transaction, number = ids.parse_message_id(message_id)
    for message in store.messages(transaction):
        is_sound = (
            message.message_no == number
            and not message.corrupt
            and decode_payload(message.payload).topic == message.topic
        )
        subscription = store.subscription(group, message.topic) if is_sound else None
        if subscription is not None:
            return message, subscription
    raise NotFound(
        f"no topic that group {group} subscribes to has {message_id}, or its payload cannot be read; nothing is sent"
    )


def _refused(error: NotifyError) -> dict[str, Any]:
    return {"status": error.status, "code": error.code, "detail": str(error)}
