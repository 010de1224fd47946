"""Ending what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait until each has ended. What one raises besides is raised."""
    for task in tasks:
        if task is not None:
            task.cancel()
    for task in tasks:
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a call in a thread. A caller that is cancelled meanwhile ends when the thread has ended.

    `asyncio.to_thread` ends its caller at once, and the thread goes on: a server that had stopped still read its
    database, and wrote into a directory that was another's by then.
    """
    call = contextvars.copy_context().run
    running = asyncio.get_running_loop().run_in_executor(None, call, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at: nobody else will
        raise
