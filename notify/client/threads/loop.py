"""LoopThread: an event loop in a separate thread, so that threads share one asyncio client. Make a new one after a
fork. Under gevent and eventlet the thread is a greenlet, as all threads there are (notify/runtime/green.py)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread  # later, in a program whose main thread has ended, its import fails
import contextlib
import importlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import BindingRefused, Closed
from notify.runtime.green import GreenLoop, out_of_sight, owns_sockets, patched_by

T = TypeVar("T")
SIGNAL_SECONDS = 0.5
"""The interval in which a thread that waits without a bound wakes up: the system may deliver a signal to any thread of
the process, but Python calls the handler only once the main thread runs."""
END_SECONDS = 2.0
"""How long cancelled tasks may take to end at a close."""
LOOKUP_THREADS = 4
"""The most threads of a loop that look up names, and make calls to a database."""
CLOSED = "this was closed while another thread waited for it, or before: make another one"
LEFT = "this belongs to the process before a fork, or to threads that gevent or eventlet has replaced: make another one"


def home() -> tuple[int, object]:
    """The process, and the kind of its threads, which an event loop and its thread belong to.

    They are compared at each use, because not every fork calls Python's hooks (uWSGI's do not), and gevent and eventlet
    may replace the threads at any time.
    """
    return os.getpid(), threading.Lock


def refuse_to_pickle(one: object) -> NoReturn:
    """Raises TypeError, as pickling does, for an object whose threads and connections belong to its process."""
    raise TypeError(
        f"a {type(one).__name__} belongs to the process that has made it, and cannot be pickled or copied: make one in "
        "each process, such as in a module that the child imports, instead of passing it as an argument"
    )


def instance_name() -> str:
    """A unique name that shows the machine and the process."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _is_subinterpreter() -> bool:
    """Whether this is not the main interpreter of its process, as mod_wsgi runs applications by default."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() != interpreters.get_main())
    return False


def new_event_loop(monotonic: Callable[[], float] = time.monotonic) -> asyncio.AbstractEventLoop:
    """A new event loop, of uvloop if it is installed; under gevent and eventlet one that yields to their greenlets.

    `monotonic`: its clock, if it is asyncio's own. Tests of a service may freeze `time.monotonic` (freezegun does), so
    that no timer of a loop that reads it there would fire: a call would wait for ever, and those set meanwhile would be
    late by years.
    """
    library = patched_by()
    if library:
        return GreenLoop(library, HandlerThreads(LOOKUP_THREADS, "notify-lookup"))
    if _is_subinterpreter():
        return _with_clock(monotonic)  # uvloop takes the lock of the main one, and waits for itself for ever
    try:
        import uvloop
    except ImportError:
        return _with_clock(monotonic)
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _with_clock(monotonic: Callable[[], float]) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.time = monotonic  # type: ignore[method-assign]
    return loop


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs here. Raises BindingRefused if none of asyncio does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise BindingRefused(
            "no event loop of asyncio runs here, and coroutines of Notify need one: run them with asyncio.run, or, "
            "under trio or without a loop, use TransactionProducer, Consumer or Reader in a thread"
        ) from None


class LoopThread:
    """Runs coroutines for threads, until `close`. Its thread is a daemon, so that it never keeps the process alive."""

    def __init__(self, name: str) -> None:
        """Raises BindingRefused where gevent or eventlet has replaced the sockets, but not the threads, and where the
        system or an interpreter that ends starts no thread."""
        if owns_sockets() and not patched_by():
            raise BindingRefused(
                "gevent or eventlet has patched the sockets of this process, but not its threads: let it patch both"
            )
        self._home = home()
        self._is_green = bool(patched_by())
        self.loop = new_event_loop()
        if not self._is_green:  # that of greenlets has such threads already
            self.loop.set_default_executor(HandlerThreads(LOOKUP_THREADS, f"{name}-call"))
        self._entering = threading.RLock()
        """Keeps threads that begin to wait apart from `close`, so that no thread waits for a stopped loop.

        It is re-entrant, because a signal handler may begin to wait in a thread that holds the lock.
        """
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            with out_of_sight():
                self._thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise BindingRefused(
                f"this process cannot start the thread that Notify needs ({error}): raise the limit of its threads; a "
                "program that sends while it ends has to use the producer once before its main thread ends"
            ) from None

    @property
    def is_at_home(self) -> bool:
        """Whether this was made in this process, and for the threads that it has now; otherwise it is of no use."""
        return self._home == home()

    def _run(self) -> None:
        if not self._is_green:  # greenlets share what is set for their thread
            asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine on the loop and return its result, or raise its exception.

        Raises TimeoutError after `seconds`, and Closed if `close` comes first, or after a fork.
        """
        if not self.is_at_home:
            coroutine.close()
            raise Closed(LEFT)
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
        """Call `start` on the loop and return the result of its future. Raises TimeoutError after `seconds`.

        This costs a third of `run`, because it needs no coroutine, no task and no concurrent future. The caller has
        made sure that the loop `is_at_home`.
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
        """Call a function on the loop, without waiting for it. After `close` this does nothing."""
        with self._entering:
            if not self._is_closing:
                self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel all coroutines, whose callers get Closed, and stop the loop and its thread.

        Call it once, from another thread.
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
        """Cancel all tasks. They include every coroutine that was passed to `run` before, because the loop keeps their
        order."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
            await asyncio.sleep(0)  # lets the loop run the callbacks of the ended tasks


def _result(future: concurrent.futures.Future[T]) -> T:
    """Wait for the result without a bound, and let Python handle signals meanwhile."""
    while True:
        try:
            return future.result(SIGNAL_SECONDS)
        except concurrent.futures.TimeoutError:
            if future.done():  # the coroutine itself may have raised a TimeoutError
                return future.result()
