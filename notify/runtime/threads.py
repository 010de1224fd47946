"""in_thread: calls a function in a thread, and waits for its end even if the caller is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: Any, stop: Callable[[], None] | None = None) -> T:
    """Call a function in a thread and return its result. A cancelled caller ends only when the thread has ended.

    With `asyncio.to_thread` the cancelled caller ends immediately while the thread continues. Then an engine was
    disposed of that the thread still used, or a directory was removed that it wrote to. `stop` is called when the
    caller is cancelled; it should make the function return soon.
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
            running.exception()  # marks it as retrieved: otherwise asyncio logs it
        raise
