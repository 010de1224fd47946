"""Ending what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait until each has ended. What one raises besides is raised."""
    for task in tasks:
        if task is not None:
            task.cancel()
    for task in tasks:
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task
