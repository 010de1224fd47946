"""HandlerThreads: a thread pool that does not keep its process from ending, and that works until its process ends.

Python waits at exit for each thread of a ThreadPoolExecutor, so that a handler that never returns would keep the
process alive long after the consumer's `drain`. In this pool such a handler is cut off, as by kill -9, and its message
is delivered again. And once the main thread has ended, each ThreadPoolExecutor refuses work, although the other threads
of a service may run on for years.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from notify.runtime.green import patched_by, start_thread

Work = tuple["Future[Any]", Callable[[], Any]]


class HandlerThreads(ThreadPoolExecutor):
    """At most `most` threads, started when they are needed. Only one thread at a time may submit.

    It has nothing of a ThreadPoolExecutor but its kind: an event loop takes no other one as its own.
    """

    def __init__(self, most: int, name: str, hit: Callable[[BaseException], None] | None = None) -> None:
        """`hit` gets an exception that another thread has raised in one of these while it had no work: some work may
        be lost with it, and the thread ends."""
        self._most = most
        self._name = name
        self._hit = hit
        # Only `queue.Queue` waits by the locks of `threading`, which greenlets replace.
        self._waiting: queue.Queue[Work | None] | queue.SimpleQueue[Work | None] = (
            queue.Queue() if patched_by() else queue.SimpleQueue()
        )
        self._idle = threading.Semaphore(0)
        """The number of idle threads for which no work is queued."""
        self._started = 0
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a thread and return the future of its result.

        Raises RuntimeError after `shutdown`, and if the system allows no thread at all.
        """
        if self._is_closed:
            raise RuntimeError("the consumer has ended: its threads no longer call handlers")
        future: Future[Any] = Future()
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._start()
        self._waiting.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _start(self) -> None:
        """Start another thread. If the system allows no more, the work waits for one of those that run."""
        try:
            start_thread(self._run, f"{self._name}_{self._started + 1}")
        except RuntimeError:
            if not self._started:
                raise
        else:
            self._started += 1

    def _run(self) -> None:
        try:
            while (work := self._waiting.get()) is not None:
                _call(*work)
                del work  # frees the message and the result before the next work comes
                self._idle.release()
            self._waiting.put(None)  # ends the next thread
        except BaseException as error:
            if self._hit is None:
                raise
            self._hit(error)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel the work that no thread has begun, and end each thread once it is idle. This does not wait."""
        self._is_closed = True
        while True:
            try:
                work = self._waiting.get_nowait()
            except queue.Empty:
                break
            if work is not None:
                work[0].cancel()
        self._waiting.put(None)


def _call(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # an asyncio future cannot hold it, so that its waiter would wait forever
        unheld = RuntimeError("StopIteration was raised")
        unheld.__cause__ = error
        future.set_exception(unheld)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
