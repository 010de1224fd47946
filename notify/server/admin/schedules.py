"""Admin routes of schedules: list and show them, make, change, pause, resume and delete them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.declaration import Write
from notify.admin_api.schedules import ScheduleWrite
from notify.protocol.limits import check_between
from notify.protocol.wire import JsonMessage, JsonSchedule
from notify.server.admin.writes import Desk, Who
from notify.server.schedules.schedules import MOST_SCHEDULES, Change

NEXT, NEXT_OF_ONE = 3, 10
"""The number of next instants in a list, and of one schedule."""


def _request(write: ScheduleWrite) -> JsonSchedule:
    fields = write.given()
    content = ("topic", "body", "body_base64", "key", "tag", "headers", "ttl")
    message = JsonMessage(**{name: fields.pop(name) for name in content if name in fields})
    return JsonSchedule(message=message, **fields)


def _outcome(change: Change, coming: list[str]) -> dict[str, Any]:
    d = change.declaration
    return {
        "changed": change.is_change,
        "topic": d.message.topic,
        "cron": d.cron,
        "every": d.every,
        "zone": d.zone,
        "catch_up": d.catch_up,
        "catch_up_most": d.catch_up_most,
        "next": coming,
    }


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `schedules`."""
    _views(routes, desk)
    _writes(routes, desk)


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/schedules")
    async def schedules(prefix: str = "", after: str = "", max: int = 1000) -> dict[str, Any]:
        """List schedules by name: at most `max` whose names begin with `prefix` and come after `after`."""
        check_between("max", max, 1, MOST_SCHEDULES)
        await desk.running.schedules.follow()
        now_us = desk.running.core.clock()
        found = [s for s in desk.running.schedules.all() if s.name.startswith(prefix)]
        rows = [s.shown(now_us, NEXT) for s in found if s.name > after][:max]
        return {"schedules": rows, "of": len(found)}

    @routes.get("/schedules/{name}")
    async def schedule(name: str) -> dict[str, Any]:
        """Show a schedule: its next instants, what it has sent and missed, and its message."""
        found = await desk.running.schedules.one(name)
        return found.shown(desk.running.core.clock(), NEXT_OF_ONE) | found.content()


def _writes(routes: APIRouter, desk: Desk) -> None:
    @routes.put("/schedules/{name}")
    async def put_schedule(name: str, write: ScheduleWrite, who: Who) -> dict[str, Any]:
        """Make or replace a schedule. With other instants than before it begins now."""
        schedules = desk.running.schedules
        change = await schedules.wanted(name, _request(write), None)
        outcome = _outcome(change, schedules.next_of(change.timetable, NEXT))

        async def do() -> Any:
            await schedules.declare(name, change, who)
            return outcome

        return await desk.carry_out(write, who, "schedule.put", name, do, outcome)

    @routes.post("/schedules/{name}/pause")
    async def pause(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Send nothing for a schedule until it is resumed."""
        return await _paused(desk, name, write, who, paused=True)

    @routes.post("/schedules/{name}/resume")
    async def resume(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Resume a schedule. What was due while it was paused is not sent."""
        return await _paused(desk, name, write, who, paused=False)

    @routes.delete("/schedules/{name}")
    async def delete_schedule(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Delete a schedule. The messages that it has sent stay."""
        found = await desk.running.schedules.one(name)

        async def do() -> Any:
            await desk.running.schedules.delete(name)
            return {"deleted": name}

        return await desk.carry_out(write, who, "schedule.delete", name, do, {"deleted": found.name})


async def _paused(desk: Desk, name: str, write: Write, who: str, *, paused: bool) -> dict[str, Any]:
    schedules = desk.running.schedules
    found = await schedules.one(name)

    async def do() -> Any:
        changed = await schedules.pause(name, paused, who)
        return {"paused": paused, "next": changed.shown(desk.running.core.clock(), NEXT)["next"]}

    coming = schedules.next_of(found.timetable, NEXT) if not paused and found.timetable is not None else []
    what = "schedule.pause" if paused else "schedule.resume"
    return await desk.carry_out(write, who, what, name, do, {"paused": paused, "next": coming})
