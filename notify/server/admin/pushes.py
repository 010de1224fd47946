"""Admin routes of push: the webhooks that receive the messages of consumer groups."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.declaration import Write
from notify.admin_api.groups import PushWrite
from notify.errors import NotFound
from notify.protocol.limits import check_name
from notify.server.admin.writes import Desk, Who
from notify.server.configuration.revisions import PUSHES
from notify.server.core.pushes import Push


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `pushes` and `groups/{name}/push`."""

    @routes.get("/pushes")
    async def shown() -> dict[str, Any]:
        """List the consumer groups whose messages are posted to a webhook, and their failures at this server."""
        return {"pushes": desk.running.pushes.shown()}

    @routes.put("/groups/{name}/push")
    async def put(name: str, write: PushWrite, who: Who) -> dict[str, Any]:
        """Post a group's messages to a webhook from now on; a status of 2xx acknowledges them."""
        check_name("group", name)
        wanted = Push(write.url, write.batch, write.at_once)
        configuration = desk.running.administration.configuration
        desk.running.pushes.check(name, wanted, configuration.pushes)

        async def do() -> Any:
            document = configuration.with_groups(PUSHES, configuration.pushes | {name: wanted})
            await desk.running.administration.revise(who, write.reason, document)
            return {"push": desk.running.pushes.shown().get(name)}

        preview = {"url": wanted.url, "batch": wanted.batch, "at_once": wanted.at_once}
        return await desk.carry_out(write, who, "push.put", name, do, {"push": preview})

    @routes.delete("/groups/{name}/push")
    async def delete(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Stop posting a group's messages; they wait for consumers."""
        configuration = desk.running.administration.configuration
        if name not in configuration.pushes:
            raise NotFound(f"the messages of group {name[:100]!r} are posted to no webhook")

        async def do() -> Any:
            remaining = {group: push for group, push in configuration.pushes.items() if group != name}
            await desk.running.administration.revise(who, write.reason, configuration.with_groups(PUSHES, remaining))
            return {}

        return await desk.carry_out(write, who, "push.delete", name, do, {})
