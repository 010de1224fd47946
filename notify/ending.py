"""How a process is told to end: a first SIGTERM or Ctrl-C asks it to stop in good order, a second one ends it at once.

Nothing that was acknowledged is lost by the second one, since kill -9 loses none of it either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_WISH_SECONDS = 0.1
"""Signals within so short a time are one wish: a terminal sends Ctrl-C to a program and to those that pass it on."""


class Wishes:
    """Counts how often somebody asks a process to end, by a signal."""

    def __init__(self) -> None:
        self._count = 0
        self._heard_at = float("-inf")

    def count(self) -> int:
        """Note a signal; which wish it belongs to, from 1."""
        now = time.monotonic()
        if now - self._heard_at >= ONE_WISH_SECONDS:
            self._count += 1
            self._heard_at = now
        return self._count


class Signals:
    """Notes the signals that come, for whoever looks at them later."""

    def __init__(self) -> None:
        self._wishes = Wishes()
        self._noted: list[tuple[int, int]] = []

    def note(self, number: int, _: object) -> None:
        """The handler of a signal."""
        self._noted.append((number, self._wishes.count()))

    def taken(self) -> list[tuple[int, int]]:
        """Those that came since the last call: the number of each, and which wish it belongs to."""
        noted, self._noted = self._noted, []
        return noted


def end_by(number: int) -> None:
    """End this process by a signal, as if nothing handled it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def heeding_signals(stop: Callable[[], object], cut: Callable[[int], object] = end_by) -> Iterator[None]:
    """While the context lasts, the first SIGTERM or SIGINT calls `stop`, the second one `cut` with its number, and the
    third one ends the process.

    For the main thread. Both are called within a signal's handler: they may set an event, or tell an event loop.
    """
    wishes = Wishes()

    def heed(number: int, _: object) -> None:
        count = wishes.count()
        if count > 2:
            end_by(number)
        elif count == 2:
            cut(number)
        else:
            stop()

    before = {number: signal.signal(number, heed) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_told(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run a coroutine on an event loop of its own until it ends, or a signal cancels it. Raises what it raises."""
    is_told = False
    running: asyncio.Task[object] | None = None

    def stop() -> None:
        nonlocal is_told
        is_told = True
        if running is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                running.get_loop().call_soon_threadsafe(running.cancel)

    async def run() -> None:
        nonlocal running
        running = asyncio.ensure_future(work())
        if is_told:
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            if not is_told:
                raise

    with heeding_signals(stop):
        asyncio.run(run())
