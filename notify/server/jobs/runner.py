"""Running jobs: beside everything else, batch by batch, and on after a restart from where they were."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from notify import faults
from notify.clock import Clock
from notify.errors import Conflict
from notify.server.core.core import Core
from notify.server.jobs import deciding
from notify.server.jobs.records import JobRecords
from notify.server.jobs.wanted import RedriveSpec, Redriving, Wanted
from notify.server.tasks import ended
from notify.threads import in_thread

BATCH = 500
Step = Callable[[int], Awaitable[tuple[list[dict[str, Any]], int] | None]]
"""Does the next few items of a job from a position on; gives what became of each, and the position to go on from. None
where nothing is left. A step that is repeated after a crash does nothing twice."""


class Jobs:
    """The jobs of one server."""

    def __init__(self, records: JobRecords, core: Core, letters: Redriving, clock: Clock) -> None:
        self.records = records
        self._core = core
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
        task = asyncio.get_running_loop().create_task(self._carry_out(number))
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

    async def _carry_out(self, number: int) -> None:
        """Carry out a job, and note its end, unless it was cancelled: who cancels it notes that."""
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
            faults.note("job_not_ended", error, job=number)  # the next start goes on with it

    async def _do_all(self, number: int) -> bool:
        """Do a job's items of [from, until), batch by batch; False where the job was cancelled."""
        records = self.records
        job = await in_thread(records.job, number)
        position, done, until = job["position"], job["done"], job["spec"]["until"]
        step = self._step(job["what"], job["spec"])
        while position < until:
            if number in self._cancelled:
                return False
            made = await step(position)
            if made is None:
                break
            items, position = made
            await in_thread(records.advance, number, items, position, done)
            done += len(items)
        return True

    def _step(self, what: str, spec: dict[str, Any]) -> Step:
        if what.startswith(deciding.JOB):
            return self._deciding(what.removeprefix(deciding.JOB), spec)
        return self._redriving(spec)

    def _redriving(self, spec: dict[str, Any]) -> Step:
        """Sends or drops a group's dead letters that match. Raises InvalidRequest for a filter that is refused now."""
        wanted = Wanted(**spec["wanted"])
        how = {name: spec[name] for name in ("replay_effects", "force", "drop") if name in spec}
        chosen = RedriveSpec(spec["group"], wanted, spec["until"], **how)

        async def step(position: int) -> tuple[list[dict[str, Any]], int] | None:
            return await self._letters.send_next(chosen, position, BATCH)

        return step

    def _deciding(self, action: str, spec: dict[str, Any]) -> Step:
        """Decides the transactions that the job names, or has them checked again."""
        names = deciding.unpacked(spec["transactions"])

        async def step(position: int) -> tuple[list[dict[str, Any]], int] | None:
            some = names[position : position + BATCH]
            return await deciding.act(self._core, action, some), position + len(some)

        return step
