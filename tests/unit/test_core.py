"""A fault in one step of the core's timer task ends neither the task nor its other steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

from notify.server.core.core import Core
from notify.settings import Settings
from notify.storage.memory import MemoryStore
from tests.support.clock import eventually_async

NOW_US = 1_800_000_000_000_000


def test_a_step_that_fails_holds_up_none_of_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        now_us = NOW_US
        core = Core(MemoryStore(), Settings(data_dir=str(tmp_path)), lambda: now_us)
        delivered: list[int] = []
        healthy = False

        async def forget() -> None:
            if not healthy:
                raise RuntimeError("dictionary changed size during iteration")

        async def deliver() -> None:
            delivered.append(now_us)

        core._steps = (forget, deliver)
        running = asyncio.ensure_future(core.run())
        try:
            await eventually_async(lambda: len(delivered) > 2, "the second step to be done again")
            now_us += 1
            await core.act()
            # Probes see the time of the last round without a fault: it stands still while a step fails.
            assert core.faults > 2 and core.ticked_us == NOW_US
            healthy = True
            await core.act()
            assert core.ticked_us == now_us
        finally:
            running.cancel()

    asyncio.run(scenario())
