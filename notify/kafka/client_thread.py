"""ClientThread: makes every call of one Kafka client, because a call from another thread would hang in a rebalance.

Kafka calls back within a poll when partitions are assigned or revoked. The event loop then may need the client again,
for example to commit. Therefore this thread continues to serve calls while a callback waits for the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from notify.runtime.program_log import program_log

T = TypeVar("T")
log = program_log("notify.kafka")


class ClientThread:
    """Made on the event loop that it belongs to."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """The calls to make. None wakes the thread so that it checks whether to stop."""
        self._waits = 0
        """The number of callbacks that wait for the loop."""
        self._deferred: list[Callable[[], None]] = []
        """Calls that are made after the callbacks."""
        self._is_closed = False
        threading.Thread(target=self._serve, args=(lambda: self._is_closed,), name=name, daemon=True).start()

    def call(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Have the thread call a function; the future has its result or exception. During a callback the call waits
        until the callback has ended."""

        def work() -> None:
            if self._waits:
                self._deferred.append(work)
            else:
                run()

        done, run = _prepared(function, arguments)
        self._work.put(work)
        return asyncio.wrap_future(done)

    async def call_also_within(self, function: Callable[..., T], *arguments: Any) -> T:
        """Like `call`, but also during a callback: for commits, which Kafka's client allows then."""
        done, run = _prepared(function, arguments)
        self._work.put(run)
        return await asyncio.wrap_future(done)

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and serve calls until it has ended. Call this in the thread: within a
        call, or from a callback.

        Raises RuntimeError if the loop is closed: an abandoned client calls back when it ends.
        """
        try:
            result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise
        result.add_done_callback(lambda _: self._work.put(None))
        self._waits += 1
        try:
            self._serve(result.done)
        finally:
            self._waits -= 1
            while self._deferred and not self._waits:
                self._work.put(self._deferred.pop(0))
        return result.result()

    def _serve(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            work = self._work.get()
            if work is not None:
                work()

    def close(self) -> None:
        """End the thread once all queued calls are made."""
        self._work.put(self._end)

    async def end(self, function: Callable[[], object], seconds: float) -> bool:
        """End the thread with a last call, once all queued calls are made. Whether it was made within `seconds`.

        The last call is made even after that time, so that the client closes its connections.
        """
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        def work() -> None:
            if self._waits:
                self._deferred.append(work)
                return
            try:
                function()
            except Exception as error:
                log.debug("a client of Kafka did not end well: %s", error)
            self._end()
            if ended.set_running_or_notify_cancel():
                ended.set_result(None)

        self._work.put(work)
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.wait([waiting], timeout=seconds)
            return waiting.done()
        finally:
            waiting.cancel()

    def _end(self) -> None:
        self._is_closed = True


def _prepared(
    function: Callable[..., T], arguments: tuple[Any, ...]
) -> tuple[concurrent.futures.Future[T], Callable[[], None]]:
    """The future of a call, and the function that makes the call."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function(*arguments))
        except BaseException as error:
            done.set_exception(error)

    return done, run
