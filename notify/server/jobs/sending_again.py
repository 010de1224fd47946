"""Sends messages to one group alone again, through a retry topic that is the group's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from notify import ids
from notify.errors import InvalidRequest, NotFound, NotifyError
from notify.message import FIRST_ID, REPLAY
from notify.server.core.core import Core
from notify.server.delivery.inboxes import refuse_letter
from notify.storage.groups import Subscription
from notify.storage.names import retry_topic
from notify.storage.records import NewMessage, NewTransaction, Put, StoredMessage
from notify.storage.topics import Topic
from notify.wire import Payload, decode_payload, encode_msgpack


def next_replay(s: Subscription) -> Subscription:
    """The subscription with a replay number that it never had: from now on inboxes take its messages for new ones."""
    number = max(s.replay, s.last_replay) + 1
    return dataclasses.replace(s, replay=number, last_replay=number)


async def send_to_group(
    core: Core,
    group: str,
    messages: Sequence[tuple[StoredMessage, bytes]],
    *,
    replay_effects: bool = False,
    force: bool = False,
) -> list[dict[str, Any]]:
    """Send messages, each under another transaction id, to one group alone; what became of each, in order.

    Those from before the group's inbox are refused without `force` or `replay_effects`.
    """
    items: list[dict[str, Any]] = []
    new: list[NewTransaction] = []
    replays: dict[str, str] = {}
    for m, again in messages:
        p = decode_payload(m.payload)
        item: dict[str, Any] = {"status": 201}
        items.append(item)
        try:
            topic = await _retry_topic(core, group, p)
            followed = _followed(core, group, p.topic)
            if not (force or replay_effects):
                refuse_letter(core.queues, followed, m, p)
            if replay_effects and p.topic not in replays:
                replays[p.topic] = await _new_replay(core, followed)
        except NotifyError as error:
            item |= {"status": error.status, "code": error.code, "detail": str(error)}
            continue
        headers = {FIRST_ID: ids.message_id(m.transaction_id, m.message_no)} | (p.headers or {})
        if replay_effects:
            headers[REPLAY] = replays[p.topic]
        p.headers = headers
        new.append(NewTransaction(again, "", [NewMessage(topic, encode_msgpack(p), p.key, p.tag)], committed=True))
    results = iter(await core.queues.put(new, core.clock()) if new else [])
    for item in items:
        if item["status"] == 201 and next(results).put is not Put.STORED:
            item["status"] = 200
    return items


def _followed(core: Core, group: str, topic: str) -> Subscription:
    """The group's subscription to a topic. Raises NotFound where it has none any more."""
    subscription = core.queues.subscription(group, topic)
    if subscription is None:
        raise NotFound(f"group {group!r} does not subscribe to {topic!r} any more")
    return subscription


async def _new_replay(core: Core, s: Subscription) -> str:
    """A replay number for letters of a topic alone: the topic's other messages keep theirs."""
    number = next_replay(s).last_replay
    await core.delivery.following.subscribe(dataclasses.replace(s, last_replay=number), None)
    return str(number)


async def _retry_topic(core: Core, group: str, p: Payload) -> str:
    """The topic through which the group gets messages of a topic again; made and subscribed when first needed."""
    followed = _followed(core, group, p.topic)
    if followed.mode == "broadcast":
        raise InvalidRequest(f"topic {p.topic!r} is broadcast: send the message again with publish", "broadcast")
    name = retry_topic(group, p.topic)
    if core.queues.subscription(group, name) is None:
        core.topics.put_soon(Topic(name))
        wanted: Subscription = dataclasses.replace(
            followed, topic=name, of_topic=p.topic, tags=(), filter="", epoch=0, replay=0, last_replay=0
        )
        await core.delivery.following.follow_retries(wanted)
    return name
