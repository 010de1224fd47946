"""Admin routes of alarms: listing the raised alarms, and silencing an alarm for a time."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.server import Silenced, Unsilenced
from notify.errors import NotFound
from notify.protocol.wire import instant
from notify.server.admin.writes import Desk, Who
from notify.server.watch.alarm import MEANING
from notify.server.watch.silences import Silence


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `alarms`."""

    @routes.get("/alarms")
    async def alarms() -> dict[str, Any]:
        """List the alarms that are raised, critical ones first, and the silences that hold."""
        silences = desk.running.silences.listed(desk.running.core.clock())
        return {"alarms": desk.running.alarms.now(), "silences": [silence.shown() for silence in silences]}

    @routes.post("/alarms/{name}/silence")
    async def silence(name: str, write: Silenced, who: Who) -> dict[str, Any]:
        """Silence an alarm of one target at this server for a time, raised or not.

        While it is silenced, no webhook gets it and no metric counts it; the overview and the list still show it.
        """
        _check(name)
        until_us = desk.running.core.clock() + round(write.seconds * 1e6)
        new = Silence(name, write.target, until_us, who, write.reason)

        async def do() -> Any:
            await desk.running.silences.put(new, desk.running.core.clock())
            return new.shown()

        return await desk.carry_out(write, who, "alarm.silence", _target(name, write.target), do, new.shown())

    @routes.post("/alarms/{name}/unsilence")
    async def unsilence(name: str, write: Unsilenced, who: Who) -> dict[str, Any]:
        """End the silence of an alarm of one target early."""
        _check(name)
        key = (name, write.target)
        preview = {"name": name, "target": write.target, "until": instant(desk.running.core.clock())}

        async def do() -> Any:
            await desk.running.silences.end(key, desk.running.core.clock())
            return preview

        return await desk.carry_out(write, who, "alarm.unsilence", _target(name, write.target), do, preview)


def _target(name: str, target: str) -> str:
    return f"{name} {target}" if target else name


def _check(name: str) -> None:
    """Raises NotFound for an unknown name."""
    if name not in MEANING:
        raise NotFound(f"there is no alarm {name[:64]!r}; the alarms are {', '.join(MEANING)}")
