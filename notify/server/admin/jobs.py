"""Long work of the administrator: it runs beside everything else, says how far it is, and goes on after a restart."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from fastapi import APIRouter

from notify.errors import Conflict, NotFound
from notify.limits import check_between
from notify.server.admin.redrive import DeadLetters, Wanted
from notify.server.admin.writes import Asker, Desk, Who, Write
from notify.server.tasks import ended
from notify.wire import instant

log = structlog.get_logger("notify.server")

BATCH = 500


class Jobs:
    """The jobs of one server."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._running: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()

    async def start(self, what: str, target: str, spec: dict[str, Any], total: int) -> int:
        """Begin a job; its number."""
        desk = self._desk
        number = await asyncio.to_thread(desk.database.add_job, what, target, spec, total, desk.core.clock())
        self._run(number)
        return number

    async def resume(self) -> None:
        """Go on with what an earlier process did not end."""
        for job in await asyncio.to_thread(self._desk.database.jobs, 10_000, "running"):
            self._run(job["id"])

    def _run(self, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self._redrive(number))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop(self) -> None:
        """Stop what runs; it goes on at the next start."""
        await ended(*self._running.values())

    async def cancel(self, number: int, why: str) -> None:
        """Stop a job for good, after the batch that it is at. Raises Conflict where it ended before that."""
        database = self._desk.database
        task = self._running.get(number)
        if task is not None:
            self._cancelled.add(number)
            await asyncio.wait([task])
            self._cancelled.discard(number)
        if not await asyncio.to_thread(database.end_job, number, "cancelled", why[:500], self._desk.core.clock()):
            raise Conflict(f"job {number} has ended already")

    async def _redrive(self, number: int) -> None:
        """Send a group's dead letters of [from, until) that match again. Repeating a batch sends none twice."""
        database, core = self._desk.database, self._desk.core
        job = await asyncio.to_thread(database.job, number)
        assert job is not None
        spec = job["spec"]
        position, done = job["position"], job["done"]
        try:
            letters = DeadLetters(core, spec["group"])
            wanted = Wanted(**spec["wanted"])  # of an earlier version it may be refused now
            while position < spec["until"]:
                if number in self._cancelled:
                    return
                batch = [m for m in letters.read(position, min(BATCH, wanted.at_once)) if m.offset < spec["until"]]
                if not batch:
                    break
                items = await letters.send_again(
                    [m for m in batch if wanted.matches(m)],
                    replay_effects=spec.get("replay_effects", False),
                    force=spec.get("force", False),
                )
                position = batch[-1].offset + 1
                await asyncio.to_thread(database.advance, number, items, position, done)
                done += len(items)
            await asyncio.to_thread(database.end_job, number, "done", "", core.clock())
        except Exception as error:
            log.error("job_failed", job=number, reason=repr(error)[:500])
            await asyncio.to_thread(database.end_job, number, "failed", str(error)[:500], core.clock())


def add_routes(routes: APIRouter, desk: Desk, jobs: Jobs) -> None:
    """The routes under `jobs`."""

    def shown(job: dict[str, Any]) -> dict[str, Any]:
        spec = job["spec"]
        span = max(1, spec["until"] - spec["from"])
        return {
            "id": job["id"],
            "what": job["what"],
            "target": job["target"],
            "state": job["state"],
            "progress": 1.0 if job["state"] == "done" else round((job["position"] - spec["from"]) / span, 4),
            "looked_at": job["position"] - spec["from"],
            "of": job["total"],
            "done": job["done"],
            "failed": job["failed"],
            "started_at": instant(job["started_us"]),
            "ended_at": instant(job["ended_us"]) if job["ended_us"] else None,
            "detail": job["detail"],
        }

    async def found(number: int) -> dict[str, Any]:
        check_between("id", number, 0, 1 << 62)
        job = await asyncio.to_thread(desk.database.job, number)
        if job is None:
            raise NotFound(f"there is no job {number}")
        return job

    @routes.get("/jobs")
    async def newest(max: int = 100) -> dict[str, Any]:
        """The newest jobs."""
        check_between("max", max, 1, 10_000)
        return {"jobs": [shown(job) for job in await asyncio.to_thread(desk.database.jobs, max)]}

    @routes.get("/jobs/{number}")
    async def job(number: int, offset: int = 0, max: int = 100) -> dict[str, Any]:
        """A job's progress, and what became of its items from number `offset` on."""
        check_between("max", max, 1, 10_000)
        check_between("offset", offset, 0, 1 << 62)
        job = await found(number)
        return shown(job) | {"items": await asyncio.to_thread(desk.database.job_items, number, offset, max)}

    @routes.post("/jobs/{number}/cancel")
    async def cancel(number: int, write: Write, who: Who, asker: Asker) -> dict[str, Any]:
        """Stop a job for good. What it has done stays done; it is not undone."""
        job = await found(number)
        asker.check("admin", job["target"], called="the group of this job")
        if job["state"] != "running":
            raise Conflict(f"job {number} has ended already: {job['state']}")

        async def do() -> Any:
            await jobs.cancel(number, f"by {who}: {write.reason}" if who else write.reason)
            return shown(await found(number))

        return await desk.carry_out(write, who, "job.cancel", str(number), do, shown(job))
