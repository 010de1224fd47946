"""Admin routes of jobs: their progress, the results of their items, and cancelling them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.declaration import Write
from notify.errors import Conflict
from notify.protocol.limits import check_between
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread
from notify.server.admin.writes import Asker, Desk, Who


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `jobs`."""

    def job_row(job: dict[str, Any]) -> dict[str, Any]:
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

    async def one(number: int) -> dict[str, Any]:
        check_between("id", number, 0, 1 << 62)
        return await in_thread(desk.running.jobs.records.job, number)

    @routes.get("/jobs")
    async def newest(max: int = 100) -> dict[str, Any]:
        """List the newest jobs."""
        check_between("max", max, 1, 10_000)
        return {"jobs": [job_row(job) for job in await in_thread(desk.running.jobs.records.jobs, max)]}

    @routes.get("/jobs/{number}")
    async def job(number: int, offset: int = 0, max: int = 100) -> dict[str, Any]:
        """Show a job's progress, and the results of its items from number `offset` on."""
        check_between("max", max, 1, 10_000)
        check_between("offset", offset, 0, 1 << 62)
        job = await one(number)
        return job_row(job) | {"items": await in_thread(desk.running.jobs.records.job_items, number, offset, max)}

    @routes.post("/jobs/{number}/cancel")
    async def cancel(number: int, write: Write, who: Who, asker: Asker) -> dict[str, Any]:
        """Cancel a job, which cannot be resumed; its finished items are not undone."""
        job = await one(number)
        asker.check("admin", job["target"], called="the group of this job")
        if job["state"] != "running":
            raise Conflict(f"job {number} has ended already: {job['state']}")

        async def do() -> Any:
            await desk.running.jobs.cancel(number, f"by {who}: {write.reason}" if who else write.reason)
            return job_row(await one(number))

        return await desk.carry_out(write, who, "job.cancel", str(number), do, job_row(job))
