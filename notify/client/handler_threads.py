"""Handler threads: a pool whose threads do not keep their process from ending.

A handler that never returns would: Python waits at its exit for each thread of a ThreadPoolExecutor, long after the
consumer's `drain` is over. A handler that is under way then is cut off, as by kill -9; its message comes again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any

Work = tuple["Future[Any]", Callable[[], Any]]


class HandlerThreads(Executor):
    """At most so many threads, started as they are needed. One thread at a time submits."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Threads that have nothing to do and that no work was given to yet."""
        self._started = 0
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a thread call a function; its result. Raises RuntimeError after `shutdown`."""
        if self._is_closed:
            raise RuntimeError("the consumer has ended: its threads call no handler any more")
        future: Future[Any] = Future()
        self._waiting.put((future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True).start()
        return future

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            _call(*work)
            del work  # neither a message nor a result is kept until the next one comes
            self._idle.release()
        self._waiting.put(None)  # the next thread's

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel what no thread has begun, and end the threads as they become free. Nobody waits for them."""
        self._is_closed = True
        while True:
            try:
                work = self._waiting.get_nowait()
            except Empty:
                break
            if work is not None:
                work[0].cancel()
        self._waiting.put(None)


def _call(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # no future of asyncio holds it, and whoever waits for one would wait for ever
        unheld = RuntimeError("StopIteration was raised")
        unheld.__cause__ = error
        future.set_exception(unheld)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
