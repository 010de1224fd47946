"""Purges of the own queues up to a point: the messages that a purge drops, and the groups that miss them."""

from __future__ import annotations

from typing import Any

from notify.server.core.core import Core
from notify.storage.topics import Topic


def preview(core: Core, topic: Topic, before: str | int) -> dict[str, Any]:
    """A purge's preview: the first offset of each queue before and after, and the messages that each group misses."""
    rows = []
    missed: dict[str, int] = {}
    subscriptions = [s for s, _ in core.delivery.followers.subscriptions_of(topic.name) if s.mode != "broadcast"]
    for queue in range(topic.queues):
        start = core.queues.bounds(topic.name, queue)[0]
        to = max(start, core.delivery.following.offset_of(topic.name, queue, before))
        dropped = core.queues.count(topic.name, queue, start, to)
        rows.append({"queue": queue, "from": start, "to": to, "dropped": dropped})
        for s in subscriptions:
            progress = core.queues.progress(s.group, topic.name, queue)
            floor = max(start, progress.floor)
            waiting = max(0, to - floor) - progress.settled.between(floor, max(floor, to))
            if waiting:
                missed[s.group] = missed.get(s.group, 0) + waiting
    return {"queues": rows, "missed": missed}


async def drop(core: Core, topic: Topic, preview: dict[str, Any]) -> dict[str, Any]:
    """Carry out a purge as its preview shows it."""
    for row in preview["queues"]:
        core.queues.trim(topic.name, row["queue"], row["to"])
    core.delivery.dropped(topic.name)
    await core.queues.sync()
    return preview
