"""Admin routes of purges: of a topic's messages, or of a group's dead letters, up to a point.

One step, however many there are: the queues begin later, and retention drops the segments when nothing else needs
them. So it is no job.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field, StrictInt

from notify.errors import Conflict
from notify.server.admin.writes import Desk, Who, Write
from notify.server.core.core import Core
from notify.storage.names import dead_letter_topic
from notify.storage.topics import Topic


class Purge(Write):
    before: str | StrictInt = Field(
        description="latest (all that is there), an instant, or an offset where the topic has one queue",
        examples=["2026-01-31T12:00:00Z"],
    )


class PurgeTopic(Purge):
    force: bool = Field(False, description="although a group still has to get some of them")


def _preview(core: Core, topic: Topic, before: str | int) -> dict[str, Any]:
    """A purge's preview: the first offset of each queue before and after, and the messages that each group misses."""
    rows = []
    missed: dict[str, int] = {}
    subscriptions = [s for s, _ in core.delivery.followers.subscriptions_of(topic.name) if s.mode != "broadcast"]
    for queue in range(topic.queues):
        start = core.queues.bounds(topic.name, queue)[0]
        to = max(start, core.delivery.following.offset_of(topic.name, queue, before))
        rows.append({"queue": queue, "from": start, "to": to, "dropped": to - start})
        for s in subscriptions:
            progress = core.queues.progress(s.group, topic.name, queue)
            floor = max(start, progress.floor)
            waiting = max(0, to - floor) - progress.settled.between(floor, max(floor, to))
            if waiting:
                missed[s.group] = missed.get(s.group, 0) + waiting
    return {"queues": rows, "missed": missed}


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `topics/{name}/purge` and `groups/{name}/dead-letters/purge`."""

    async def drop(topic: Topic, preview: dict[str, Any]) -> dict[str, Any]:
        for row in preview["queues"]:
            desk.core.queues.trim(topic.name, row["queue"], row["to"])
        await desk.core.queues.sync()
        return preview

    @routes.post("/topics/{name}/purge")
    async def purge(name: str, write: PurgeTopic, who: Who) -> dict[str, Any]:
        """Purge a topic's messages up to a point; messages that groups have not settled only with `force`.

        Transactions in doubt and delayed messages are in no queue yet: they stay.
        """
        topic = desk.topic(name)
        preview = _preview(desk.core, topic, write.before)
        if preview["missed"] and not write.force and not write.dry_run:
            groups = ", ".join(f"{group} {count}" for group, count in sorted(preview["missed"].items())[:10])
            raise Conflict(
                f"groups have not settled all of them: {groups}; let them catch up, reset them, or purge with force",
                "not_settled",
            )
        return await desk.carry_out(write, who, "topic.purge", name, lambda: drop(topic, preview), preview)

    @routes.post("/groups/{name}/dead-letters/purge")
    async def purge_dead_letters(name: str, write: Purge, who: Who) -> dict[str, Any]:
        """Purge a group's dead letters that died before a point, redriven or not."""
        topic = desk.topic(dead_letter_topic(name))
        preview = _preview(desk.core, topic, write.before)
        return await desk.carry_out(write, who, "dead_letter.purge", name, lambda: drop(topic, preview), preview)
