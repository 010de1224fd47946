"""Work that continues while a test goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.support.clock import PATIENCE_SECONDS, eventually

T = TypeVar("T")


@contextmanager
def repeated(
    call: Callable[[], object], *, threads: int, pause_seconds: float, passing: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Make a call again and again in so many threads until the context ends; an error of these kinds passes."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(pause_seconds):
            try:
                call()
            except passing:
                continue

    working = [threading.Thread(target=go_on) for _ in range(threads)]
    for thread in working:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in working:
            thread.join(PATIENCE_SECONDS)


class Background:
    """A coroutine that runs on a loop of its own, in a thread of its own: a bridge or a relay, say."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._has_begun = threading.Event()
        self._is_expected = False
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._thread.start()
        self._has_begun.wait(PATIENCE_SECONDS)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work)
        self._has_begun.set()
        await asyncio.wait([self._task])

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def until(self, check: Callable[[], T], waiting_for: str, seconds: float = PATIENCE_SECONDS) -> T:
        """Wait as `eventually` does. Fails at once if the work ends before that; its error is raised."""
        answer = check()

        def is_over() -> bool:
            nonlocal answer
            has_ended = self.has_ended
            answer = answer or check()
            return bool(answer) or has_ended

        eventually(is_over, waiting_for, seconds)
        if not answer:
            self.result()
            raise AssertionError(f"it ended without {waiting_for}")
        return answer

    def result(self) -> Any:
        """Wait for the end, and return the work's result or raise its error."""
        self._is_expected = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "it does not end"
        return self._task.result()

    def stop(self) -> None:
        """Cancel it, and wait for its end. Raises its error if it has ended by itself, unless `result` has done so."""
        if not self.has_ended:
            self._is_expected = True
            with contextlib.suppress(RuntimeError):  # it ends at this moment
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(PATIENCE_SECONDS)
            assert not self._thread.is_alive(), "it does not end"
            self._task.cancelled() or self._task.exception()
        elif not self._is_expected:
            self.result()


@contextmanager
def in_background(work: Coroutine[Any, Any, Any]) -> Iterator[Background]:
    """Let a coroutine run until the context ends."""
    background = Background(work)
    try:
        yield background
    finally:
        background.stop()
