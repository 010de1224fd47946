"""An event loop in a thread of its own, so that threads and asyncio share one client. Made anew after a fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from notify.errors import Closed

T = TypeVar("T")
SIGNAL_SECONDS = 0.5
"""So often a thread that waits without a bound looks up: the system may hand a signal to any thread of the process, and
Python's handler is called only once the main thread does something."""
END_SECONDS = 2.0
"""How long what is cancelled at the end may take to end."""
CLOSED = "this was closed while another thread waited for it, or before: make another one"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """Runs coroutines for threads. `close` stops it; a daemon, so that it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._entering = threading.RLock()
        """Between those who begin to wait and `close`: nobody waits for a loop that has stopped.

        Re-entrant, since a signal's handler may run, and begin to wait, in a thread that holds it.
        """
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """The coroutine's result; what it raises is raised here.

        Raises TimeoutError after `seconds`, and Closed where `close` comes first.
        """
        with self._entering:
            if self._is_closing:
                coroutine.close()
                raise Closed(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return _result(future) if seconds is None else future.result(seconds)
        except concurrent.futures.CancelledError:
            raise Closed(CLOSED) from None
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError from None

    def wait_for(self, start: Callable[[], asyncio.Future[T]], seconds: float) -> T:
        """The result of the future that `start` returns, called on the loop. Raises TimeoutError after `seconds`.

        A third of what `run` costs: no coroutine, no task, no second kind of future.
        """
        done = threading.Lock()
        done.acquire()
        futures: list[asyncio.Future[T]] = []

        def begin() -> None:
            try:
                future = start()
            except BaseException as error:
                future = self.loop.create_future()
                future.set_exception(error)
            futures.append(future)
            future.add_done_callback(lambda _: done.release())

        with self._entering:
            if self._is_closing:
                raise Closed(CLOSED)
            self.loop.call_soon_threadsafe(begin)
        if not done.acquire(timeout=seconds):
            self.call(lambda: [future.cancel() for future in futures])
            raise TimeoutError
        return futures[0].result()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop without waiting; not at all after `close`."""
        with self._entering:
            if not self._is_closing:
                self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what is under way, which whoever waits for it is told, and stop the loop and its thread.

        To be called once, from another thread.
        """
        with self._entering:
            self._is_closing = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ending.result(END_SECONDS + 1)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self.loop.close()

    async def _end(self) -> None:
        """Cancel all tasks: what was begun before is among them, since the loop begins things in their order."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
            await asyncio.sleep(0)  # what is done is told on the loop


def _result(future: concurrent.futures.Future[T]) -> T:
    """Wait without a bound, and let Python handle signals meanwhile."""
    while True:
        try:
            return future.result(SIGNAL_SECONDS)
        except concurrent.futures.TimeoutError:
            if future.done():  # it may have this very error
                return future.result()
