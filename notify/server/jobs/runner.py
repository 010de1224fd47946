"""Running jobs: beside everything else, batch by batch, and on after a restart from where they were."""

from __future__ import annotations

import asyncio
from typing import Any

from notify import faults
from notify.clock import Clock
from notify.errors import Conflict
from notify.server.jobs.records import JobRecords
from notify.server.jobs.redrive import RedriveSpec, Redriving, Wanted
from notify.server.tasks import ended
from notify.threads import in_thread

BATCH = 500


class Jobs:
    """The jobs of one server."""

    def __init__(self, records: JobRecords, letters: Redriving, clock: Clock) -> None:
        self.records = records
        self._letters = letters
        self._clock = clock
        self._running: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()

    async def start(self, what: str, target: str, spec: dict[str, Any], total: int) -> int:
        """Begin a job; its number."""
        now_us = self._clock()
        number = await in_thread(self.records.add_job, what, target, spec, total, now_us)
        self._run(number)
        return number

    async def resume(self) -> None:
        """Go on with what an earlier process did not end."""
        for job in await in_thread(self.records.jobs, 10_000, "running"):
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
        if not await in_thread(self.records.end_job, number, "cancelled", why[:500], self._clock()):
            raise Conflict(f"job {number} has ended already")

    async def _redrive(self, number: int) -> None:
        """Carry out a job, and note its end, unless it was cancelled: who cancels it notes that."""
        state, why = "done", ""
        try:
            if not await self._send_all(number):
                return
        except Exception as error:
            faults.note("job_failed", error, job=number)
            state, why = "failed", str(error)[:500]
        try:
            await in_thread(self.records.end_job, number, state, why, self._clock())
        except Exception as error:
            faults.note("job_not_ended", error, job=number)  # the next start goes on with it

    async def _send_all(self, number: int) -> bool:
        """Send or drop a group's dead letters of [from, until) that match; False where the job was cancelled.

        Repeating a batch sends none twice.
        """
        records = self.records
        job = await in_thread(records.job, number)
        spec = job["spec"]
        position, done = job["position"], job["done"]
        wanted = Wanted(**spec["wanted"])  # of an earlier version it may be refused now
        how = {name: spec[name] for name in ("replay_effects", "force", "drop") if name in spec}
        chosen = RedriveSpec(spec["group"], wanted, spec["until"], **how)
        while position < spec["until"]:
            if number in self._cancelled:
                return False
            sent = await self._letters.send_next(chosen, position, BATCH)
            if sent is None:
                break
            items, position = sent
            await in_thread(records.advance, number, items, position, done)
            done += len(items)
        return True
