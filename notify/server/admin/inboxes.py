"""Admin route by which consumers tell from when on their group's inbox is whole."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from notify.errors import NotFound
from notify.limits import check_name
from notify.server.admin.writes import Desk
from notify.server.delivery.inboxes import whole_from
from notify.wire import microseconds


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    whole_from: AwareDatetime = Field(description="rows of messages committed earlier may be gone")


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
            whole = dataclasses.replace(s, inbox_from_us=whole_from(core.queues, s, from_us, core.clock(), is_fresh))
            if whole != s:
                await core.delivery.subscribe(whole, None)
        return {"group": name, "topic": topic}


def _is(pattern: str, topic: str) -> bool:
    return pattern == topic or ("*" in pattern and fnmatchcase(topic, pattern))
