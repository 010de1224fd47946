"""The thread that makes every call of one Kafka client: a call that another thread makes would hang in a rebalance.

Kafka calls back within a poll when partitions come and go. What the loop then does may need the client again, to commit
for example: while a callback waits for the loop, this thread goes on to serve its calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("notify.consumer")


class ClientThread:
    """Made on the event loop that it belongs to."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """None only has those who serve look whether they are to go on."""
        self._waits = 0
        self._aside: list[Callable[[], None]] = []
        self._is_closed = False
        threading.Thread(target=self._serve, args=(lambda: self._is_closed,), name=name, daemon=True).start()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread, and return or raise what it does. Not within a callback: it comes after it."""

        def work() -> None:
            if self._waits:
                self._aside.append(work)
            else:
                run()

        done, run = _prepared(function, arguments)
        self._work.put(work)
        return await asyncio.wrap_future(done)

    async def call_also_within(self, function: Callable[..., T], *arguments: Any) -> T:
        """As `call`, also while a callback waits: for commits, which Kafka's client takes then."""
        done, run = _prepared(function, arguments)
        self._work.put(run)
        return await asyncio.wrap_future(done)

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """In this thread, within a call: run a coroutine in the loop, and serve calls until it has ended.

        Raises RuntimeError where the loop is closed: a client that was left to itself calls back when it ends.
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
            while self._aside and not self._waits:
                self._work.put(self._aside.pop(0))
        return result.result()

    def _serve(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            work = self._work.get()
            if work is not None:
                work()

    def close(self) -> None:
        """End once what was asked for is done."""
        self._work.put(self._end)

    async def end(self, function: Callable[[], object], seconds: float) -> None:
        """End with a last call, once what was asked for is done. Waits at most so long for that.

        The last call is made also where nobody waits for it any more: a client gives its connections back.
        """
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        def work() -> None:
            if self._waits:
                self._aside.append(work)
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
        finally:
            waiting.cancel()

    def _end(self) -> None:
        self._is_closed = True


def _prepared(
    function: Callable[..., T], arguments: tuple[Any, ...]
) -> tuple[concurrent.futures.Future[T], Callable[[], None]]:
    """A call's future, and what carries it out."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function(*arguments))
        except BaseException as error:
            done.set_exception(error)

    return done, run
