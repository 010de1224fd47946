"""Admin routes of objectives: how soon the messages of a group are to be acknowledged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from notify.admin_api.declaration import Write
from notify.admin_api.groups import ObjectiveWrite
from notify.errors import InvalidRequest, NotFound
from notify.protocol.limits import check_name
from notify.server.admin.writes import Desk, Who
from notify.server.configuration.revisions import OBJECTIVES
from notify.server.core.objectives import MOST_OBJECTIVES, Objective


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `groups/{name}/objective`."""

    async def revise(who: str, reason: str, objectives: Mapping[str, Objective]) -> None:
        administration = desk.running.administration
        await administration.revise(who, reason, administration.configuration.with_groups(OBJECTIVES, objectives))

    @routes.put("/groups/{name}/objective")
    async def put(name: str, write: ObjectiveWrite, who: Who) -> dict[str, Any]:
        """Set how soon a share of a group's messages is to be acknowledged; an alarm says when it is not."""
        check_name("group", name)
        if name not in desk.running.core.delivery.groups:
            raise NotFound(f"group {name!r} has no subscription: subscribe it first", "not_subscribed")
        wanted = Objective(write.within, write.share)
        objectives = desk.running.administration.configuration.objectives
        if len({*objectives, name}) > MOST_OBJECTIVES:
            raise InvalidRequest(f"{MOST_OBJECTIVES} groups have an objective; remove one first", "out_of_bounds")
        result = {"objective": asdict(wanted)}

        async def do() -> Any:
            await revise(who, write.reason, objectives | {name: wanted})
            return result

        return await desk.carry_out(write, who, "objective.put", name, do, result)

    @routes.delete("/groups/{name}/objective")
    async def delete(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Remove a group's objective."""
        objectives = desk.running.administration.configuration.objectives
        if name not in objectives:
            raise NotFound(f"group {name[:100]!r} has no objective")

        async def do() -> Any:
            await revise(who, write.reason, {group: o for group, o in objectives.items() if group != name})
            return {"objective": None}

        return await desk.carry_out(write, who, "objective.delete", name, do, {"objective": None})
