"""Sends messages again to one group alone, through the group's retry topic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from notify.errors import InvalidRequest, NotFound, NotifyError
from notify.protocol import ids
from notify.protocol.message import FIRST_ID, REPLAY
from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.server.core.core import Core
from notify.server.delivery.inboxes import refuse_letter
from notify.storage.groups import Subscription
from notify.storage.names import retry_topic
from notify.storage.records import NewMessage, NewTransaction, Put, StoredMessage
from notify.storage.topics import Topic


def next_replay(subscription: Subscription) -> Subscription:
    """The subscription with a replay number that it never had, so that inboxes treat its messages as new."""
    number = max(subscription.replay, subscription.last_replay) + 1
    return dataclasses.replace(subscription, replay=number, last_replay=number)


async def send_to_group(
    core: Core,
    group: str,
    messages: Sequence[tuple[StoredMessage, bytes]],
    *,
    replay_effects: bool = False,
    force: bool = False,
) -> list[dict[str, Any]]:
    """Send messages, each with its new transaction id, to one group alone; the result for each message, in order.

    Messages from before the group's inbox are refused without `force` or `replay_effects`.
    """
    items: list[dict[str, Any]] = []
    transactions: list[NewTransaction] = []
    replays: dict[str, str] = {}
    for stored, new_id in messages:
        payload = decode_payload(stored.payload)
        item: dict[str, Any] = {"status": 201}
        items.append(item)
        try:
            topic = await _retry_topic(core, group, payload)
            subscription = _subscription(core, group, payload.topic)
            if not (force or replay_effects):
                refuse_letter(core.queues, subscription, stored, payload)
            if replay_effects and payload.topic not in replays:
                replays[payload.topic] = await _new_replay(core, subscription)
        except NotifyError as error:
            item |= {"status": error.status, "code": error.code, "detail": str(error)}
            continue
        headers = {FIRST_ID: ids.message_id(stored.transaction_id, stored.message_no)} | (payload.headers or {})
        if replay_effects:
            headers[REPLAY] = replays[payload.topic]
        payload.headers = headers
        message = NewMessage(topic, encode_msgpack(payload), payload.key, payload.tag)
        transactions.append(NewTransaction(new_id, "", [message], committed=True))
    results = iter(await core.queues.put(transactions, core.clock()) if transactions else [])
    for item in items:
        if item["status"] == 201 and next(results).put is not Put.STORED:
            item["status"] = 200
    return items


def _subscription(core: Core, group: str, topic: str) -> Subscription:
    """The group's subscription to a topic. Raises NotFound if there is no such subscription any more."""
    subscription = core.queues.subscription(group, topic)
    if subscription is None:
        raise NotFound(f"group {group!r} does not subscribe to {topic!r} any more")
    return subscription


async def _new_replay(core: Core, subscription: Subscription) -> str:
    """A new replay number for dead letters of a topic; the topic's other messages keep their number."""
    number = next_replay(subscription).last_replay
    await core.delivery.following.subscribe(dataclasses.replace(subscription, last_replay=number), None)
    return str(number)


async def _retry_topic(core: Core, group: str, payload: Payload) -> str:
    """The group's retry topic for a message; it is made and subscribed when first needed."""
    subscription = _subscription(core, group, payload.topic)
    if subscription.mode == "broadcast":
        raise InvalidRequest(f"topic {payload.topic!r} is broadcast: send the message again with publish", "broadcast")
    name = retry_topic(group, payload.topic)
    if core.queues.subscription(group, name) is None:
        core.topics.put_soon(Topic(name))
        wanted: Subscription = dataclasses.replace(
            subscription, topic=name, of_topic=payload.topic, tags=(), filter="", epoch=0, replay=0, last_replay=0
        )
        await core.delivery.following.follow_retries(wanted)
    return name
