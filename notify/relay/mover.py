"""The protocol of a way to move a page of an outbox to a target, the counts of a relay, and calls in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from notify.outbox import Outbox

T = TypeVar("T")


@dataclass(slots=True)
class Relayed:
    """Counts of a relay. `refused` ones stay in their table, on the list of refused messages."""

    sent: int = 0
    refused: int = 0


class Mover(Protocol):
    """One way to move."""

    async def move(self, outbox: Outbox) -> bool:
        """Read, send and mark; False if there was nothing.

        Raises Unavailable where source or target are away, or take nothing for now.
        """
        ...


async def in_thread(function: Callable[..., T], *arguments: Any, stop: Callable[[], None] | None = None) -> T:
    """Call in a thread. Cancelled, it waits for that: whoever has stopped a relay may dispose of its engine.

    `stop` is called first then: it has the function return soon.
    """
    running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait([running])
        raise
