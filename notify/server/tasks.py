"""Work that is done again and again beside the requests, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from notify import faults


async def repeated(
    work: Callable[[], Awaitable[None]], seconds: Callable[[], float], failed: str, *, at_once: bool = False
) -> None:
    """Do the work every so many seconds until cancelled; `at_once`: first before any wait.

    A failure is noted under the name `failed`, and the work is done again after the next wait.
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
    """Cancel tasks, and wait until each has ended. What one raises besides is raised."""
    for task in tasks:
        if task is not None:
            task.cancel()
    for task in tasks:
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task
