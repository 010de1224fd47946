"""Calls in threads that a coroutine waits for, also where it is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: Any, stop: Callable[[], None] | None = None) -> T:
    """The result of a call in a thread. A caller that is cancelled meanwhile ends when the thread has ended.

    `asyncio.to_thread` ends its caller at once, and the thread goes on: whoever had stopped a part disposed of an
    engine that the thread used, or removed a directory that it wrote to. `stop` is called first: it has the function
    return soon.
    """
    call = contextvars.copy_context().run
    running = asyncio.get_running_loop().run_in_executor(None, call, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # read, or asyncio would log that nobody did
        raise
