"""Background tasks: work that is repeated while requests are served, and the end of such tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from notify.runtime import faults


async def repeated(
    work: Callable[[], Awaitable[None]], seconds: Callable[[], float], failed: str, *, at_once: bool = False
) -> None:
    """Await `work` every `seconds()` until cancelled; with `at_once` also before the first wait.

    A failure is logged as the event `failed`, and the work is repeated after the next wait.
    """
    if not at_once:
        await asyncio.sleep(seconds())
    while True:
        try:
            await work()
        except Exception as error:
            faults.note(failed, error)
        await asyncio.sleep(seconds())


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait until each has ended. Raises what a task raises, except its cancellation."""
    for task in tasks:
        if task is not None:
            task.cancel()
    for task in tasks:
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task
