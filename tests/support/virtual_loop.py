"""Asyncio loops whose clock is virtual: they never wait, they move time to the next timer. One seed, one run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

pass_seconds = asyncio.sleep
"""On the virtual clock: nothing waits."""


LOOK_SECONDS = 0.02
"""How long a loop with connections looks, before it moves its clock."""


class _NoWaiting(selectors.SelectSelector):
    """Instead of sleeping, moves the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation stands still: everything waits for something that cannot come")
        self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Callbacks run in the order of their times; without I/O or threads a run is a function of its seed."""

    def __init__(self) -> None:
        selector = _NoWaiting()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    """Looks for what is ready, and moves the loop's clock where nothing is."""

    loop: JumpingLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(LOOK_SECONDS if timeout else timeout)
        if timeout and not ready:
            self.loop.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """With real connections; the clock moves to the next timer while nothing comes in.

    So no time depends on the machine: a deadline is kept to the microsecond, or missed.
    """

    def __init__(self) -> None:
        selector = _Jumping()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
