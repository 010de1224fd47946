"""Admin routes that purge a topic's messages, or a group's dead letters, up to a point.

A purge is one step, however many messages it covers, so that it needs no job: it moves the start of the queues, and
retention drops the segments once nothing else needs them.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.topics import Purge, PurgeTopic
from notify.errors import Conflict
from notify.server.admin.writes import Desk, Who
from notify.server.groups import purging


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `topics/{name}/purge` and `groups/{name}/dead-letters/purge`."""

    @routes.post("/topics/{name}/purge")
    async def purge(name: str, write: PurgeTopic, who: Who) -> dict[str, Any]:
        """Purge a topic's messages up to a point; messages that a group has not settled need `force`.

        Transactions in doubt and delayed messages are in no queue yet: they stay.
        """
        topic = desk.topic(name)
        preview = purging.preview(desk.running.core, topic, write.before)
        if preview["missed"] and not write.force and not write.dry_run:
            groups = ", ".join(f"{group} {count}" for group, count in sorted(preview["missed"].items())[:10])
            raise Conflict(
                f"groups have not settled all messages: {groups}; let them catch up, reset them, or purge with force",
                "not_settled",
            )

        async def do() -> Any:
            return await purging.drop(desk.running.core, topic, preview)

        return await desk.carry_out(write, who, "topic.purge", name, do, preview)

    @routes.post("/groups/{name}/dead-letters/purge")
    async def purge_dead_letters(name: str, write: Purge, who: Who) -> dict[str, Any]:
        """Purge a group's dead letters from before a point, redriven or not."""
        preview, do = await desk.running.queues.letters.purge(name, write.before)
        return await desk.carry_out(write, who, "dead_letter.purge", name, do, preview)
