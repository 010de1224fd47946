"""From when on a group's inbox is whole: its consumers say so, and nothing from before that comes again unasked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from notify import ids
from notify.errors import Conflict, NotFound
from notify.limits import check_name
from notify.message import FIRST_ID
from notify.server.admin.writes import Desk
from notify.server.core import Core
from notify.storage.store import StoredMessage, Subscription
from notify.wire import Payload, instant, microseconds

NEVER_TOLD = -1
READ_BYTES = 1


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    whole_from: AwareDatetime = Field(description="rows of messages committed earlier may be gone")


def refuse_before(s: Subscription, times_us: Iterable[int]) -> None:
    """Raises Conflict if one of these messages, by when it was committed, is older than what the inbox has rows of."""
    if any(time_us < s.inbox_from_us for time_us in times_us):
        raise Conflict(
            f"the inbox of group {s.group!r} has rows of topic {s.topic!r} only from {instant(s.inbox_from_us)} on: "
            "older messages would take effect a second time; begin later, or send force (of a start: subscribe the "
            "group first, with force)",
            "before_inbox",
        )


def first_from(core: Core, topic: str, queue: int, offset: int) -> list[int]:
    """When the first message from an offset on was committed; empty where there is none."""
    return [m.committed_us for m in core.queues.read(topic, queue, offset, 1, READ_BYTES)]


def refuse_letter(core: Core, s: Subscription, m: StoredMessage, p: Payload) -> None:
    """As `refuse_before`, for a dead letter: by its commit where it is still in its queue, else by its first id."""
    headers = p.headers or {}
    try:
        transaction, _ = ids.parse_message_id(headers.get(FIRST_ID, ""))
    except ValueError:
        transaction = m.transaction_id
    began_us = ids.milliseconds(transaction) * 1000
    queue, offset = headers.get("notify-dead-letter-queue", ""), headers.get("notify-dead-letter-offset", "")
    if began_us < s.inbox_from_us and queue.isdecimal() and offset.isdecimal():
        # The id has the time of its producer's clock.
        for original in core.queues.read(p.topic, int(queue), int(offset), 1, READ_BYTES):
            if original.transaction_id == transaction:
                began_us = original.committed_us
    refuse_before(s, [began_us])


def although(s: Subscription, force: bool) -> Subscription:
    """With `force` an inbox that has never been told of is taken for whole: somebody wants the effects again."""
    return dataclasses.replace(s, inbox_from_us=max(s.inbox_from_us, 0)) if force else s


def add_routes(routes: APIRouter, desk: Desk, fresh: set[tuple[str, str]]) -> None:
    """The route that consumers with an inbox call as they start, and after a purge.

    `fresh`: subscriptions that were made since the server started, of which nothing was handed out when they are told.
    """

    @routes.put("/groups/{name}/subscriptions/{topic}/inbox")
    async def tell(name: str, topic: str, told: Whole) -> dict[str, Any]:
        """A consumer says from when on its inbox has a row for each message that took effect."""
        core = desk.core
        check_name("topic", topic.replace("*", "x"))  # a right is asked for `*` alone: fnmatch knows more than that
        from_us = max(0, microseconds(told.whole_from))
        pattern = next((p for p in core.queues.patterns() if (p.group, p.topic) == (name, topic)), None)
        if pattern is not None and from_us > pattern.inbox_from_us:
            await core.queues.set_pattern(dataclasses.replace(pattern, inbox_from_us=from_us))
        meant = [s for s in core.queues.subscriptions() if s.group == name and not s.of_topic and _is(topic, s.topic)]
        if not meant and pattern is None:
            raise NotFound(f"group {name[:100]!r} has no subscription to {topic[:100]!r}")
        for s in meant:
            is_fresh = (s.group, s.topic) in fresh and not core.delivery.groups[name].instances
            fresh.discard((s.group, s.topic))
            whole = dataclasses.replace(s, inbox_from_us=_whole_from(core, s, from_us, is_fresh))
            if whole != s:
                await core.delivery.subscribe(whole, None)
        return {"group": name, "topic": topic}


def _is(pattern: str, topic: str) -> bool:
    return pattern == topic or ("*" in pattern and fnmatchcase(topic, pattern))


def _whole_from(core: Core, s: Subscription, from_us: int, is_fresh: bool) -> int:
    """Messages settled before a group's inbox began have no rows in it. Raises Conflict for an earlier start."""
    if s.inbox_from_us != NEVER_TOLD:
        return max(s.inbox_from_us, from_us)
    topic = core.queues.topic(s.topic)
    times_us = []
    for queue in range(topic.queues if topic is not None else 0):
        progress = core.queues.progress(s.group, s.topic, queue)
        if not is_fresh and (progress.settled or progress.floor > core.queues.bounds(s.topic, queue)[0]):
            return max(core.clock(), from_us)
        times_us += first_from(core, s.topic, queue, progress.floor)
    refuse_before(dataclasses.replace(s, inbox_from_us=from_us), times_us)
    return from_us
