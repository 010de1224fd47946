"""Runs jobs in the background, batch by batch; after a restart they continue where they were."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from notify.errors import Conflict
from notify.runtime import faults
from notify.runtime.clock import Clock
from notify.runtime.threads import in_thread
from notify.server.core.core import Core
from notify.server.jobs import deciding
from notify.server.jobs.records import JobRecords
from notify.server.letters.engine import Closing
from notify.server.letters.letters import Letters
from notify.server.letters.query import JobSpec, LetterQuery
from notify.server.tasks import ended

BATCH = 500
Step = Callable[[int], Awaitable[tuple[list[dict[str, Any]], int] | None]]
"""Carries out the next items of a job from a position on; returns their results, and the position to continue from, or
None if no items are left. A step that is repeated after a crash does nothing twice."""


class Jobs:
    """The jobs of one server."""

    def __init__(self, records: JobRecords, core: Core, letters: Letters[Any], clock: Clock) -> None:
        self.records = records
        self._core = core
        self._letters = letters
        self._clock = clock
        self._running: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()

    async def start(self, what: str, target: str, spec: dict[str, Any], total: int) -> int:
        """Start a job; its number."""
        now_us = self._clock()
        number = await in_thread(self.records.add_job, what, target, spec, total, now_us)
        self._run(number)
        return number

    async def resume(self) -> None:
        """Continue the jobs that an earlier process did not finish."""
        for job in await in_thread(self.records.jobs, 10_000, "running"):
            self._run(job["id"])

    def _run(self, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(number))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop(self) -> None:
        """Stop the running jobs; they continue at the next start."""
        await ended(*self._running.values())

    async def cancel(self, number: int, why: str) -> None:
        """Cancel a job after its current batch. Raises Conflict if it has ended before that."""
        task = self._running.get(number)
        if task is not None:
            self._cancelled.add(number)
            await asyncio.wait([task])
            self._cancelled.discard(number)
        if not await in_thread(self.records.end_job, number, "cancelled", why[:500], self._clock()):
            raise Conflict(f"job {number} has ended already")

    async def _carry_out(self, number: int) -> None:
        """Carry out a job and record its end; `cancel` records the end of a cancelled job."""
        state, why = "done", ""
        try:
            if not await self._do_all(number):
                return
        except Exception as error:
            faults.note("job_failed", error, job=number)
            state, why = "failed", str(error)[:500]
        try:
            await in_thread(self.records.end_job, number, state, why, self._clock())
        except Exception as error:
            faults.note("job_not_ended", error, job=number)  # the next start continues the job

    async def _do_all(self, number: int) -> bool:
        """Carry out a job's items in [from, until), batch by batch; False if the job was cancelled."""
        records = self.records
        job = await in_thread(records.job, number)
        position, done, until = job["position"], job["done"], job["spec"]["until"]
        step = self._step(job["what"], job["spec"])
        while position < until:
            if number in self._cancelled:
                return False
            results = await step(position)
            if results is None:
                break
            items, position = results
            await in_thread(records.advance, number, items, position, done)
            done += len(items)
        return True

    def _step(self, what: str, spec: dict[str, Any]) -> Step:
        if what.startswith(deciding.JOB):
            return self._deciding(what.removeprefix(deciding.JOB), spec)
        return self._redriving(spec)

    def _redriving(self, spec: dict[str, Any]) -> Step:
        """The step that sends or drops matching dead letters. Raises InvalidRequest if the filter is refused now."""
        wanted = LetterQuery(**spec["wanted"])
        how = {name: spec[name] for name in ("replay_effects", "force", "drop") if name in spec}
        chosen = JobSpec(spec["group"], wanted, spec["until"], Closing(**how))

        async def step(position: int) -> tuple[list[dict[str, Any]], int] | None:
            return await self._letters.close_next(chosen, position, BATCH)

        return step

    def _deciding(self, action: str, spec: dict[str, Any]) -> Step:
        """The step that decides or checks the transactions of the job."""
        transaction_ids = deciding.unpacked(spec["transactions"])

        async def step(position: int) -> tuple[list[dict[str, Any]], int] | None:
            batch = transaction_ids[position : position + BATCH]
            return await deciding.act(self._core, action, batch), position + len(batch)

        return step
