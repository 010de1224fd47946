"""Running jobs: beside everything else, batch by batch, and on after a restart from where they were."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from notify.errors import Conflict
from notify.server.core.core import Core
from notify.server.jobs.records import JobRecords
from notify.server.jobs.redrive import DeadLetters, Wanted
from notify.server.tasks import ended

log = structlog.get_logger("notify.server")

BATCH = 500


class Jobs:
    """The jobs of one server."""

    def __init__(self, records: JobRecords, core: Core) -> None:
        self.records = records
        self._core = core
        self._running: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()

    async def start(self, what: str, target: str, spec: dict[str, Any], total: int) -> int:
        """Begin a job; its number."""
        now_us = self._core.clock()
        number = await asyncio.to_thread(self.records.add_job, what, target, spec, total, now_us)
        self._run(number)
        return number

    async def resume(self) -> None:
        """Go on with what an earlier process did not end."""
        for job in await asyncio.to_thread(self.records.jobs, 10_000, "running"):
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
        task = self._running.get(number)
        if task is not None:
            self._cancelled.add(number)
            await asyncio.wait([task])
            self._cancelled.discard(number)
        if not await asyncio.to_thread(self.records.end_job, number, "cancelled", why[:500], self._core.clock()):
            raise Conflict(f"job {number} has ended already")

    async def _redrive(self, number: int) -> None:
        """Send a group's dead letters of [from, until) that match again. Repeating a batch sends none twice."""
        records, core = self.records, self._core
        job = await asyncio.to_thread(records.job, number)
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
                await asyncio.to_thread(records.advance, number, items, position, done)
                done += len(items)
            await asyncio.to_thread(records.end_job, number, "done", "", core.clock())
        except Exception as error:
            log.error("job_failed", job=number, reason=repr(error)[:500])
            await asyncio.to_thread(records.end_job, number, "failed", str(error)[:500], core.clock())
