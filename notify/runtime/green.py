"""Green threads: whether gevent or eventlet has put greenlets in the place of Python's threads, and an event loop that
lets the other greenlets run while it waits.

In such a process everything of a client runs as greenlets, in the caller's own thread: its event loop, the handlers,
the answers to checks. So they may use connections and locks of the service, which belong to that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any


def patched_by() -> str:
    """The library whose greenlets are this process's threads, `gevent` or `eventlet`; empty for threads of the system.

    Code may replace the threads at any time, also after the import of this package.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return "eventlet"
    return ""


def owns_sockets() -> bool:
    """Whether each new socket belongs to the thread that made it, because its waits are those of greenlets."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return (gevent is not None and gevent.is_module_patched("socket")) or (
        eventlet is not None and eventlet.is_monkey_patched("socket")
    )


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """Within this context no loop of ours seems to run in this thread: what is called may let other greenlets run,
    whose code must not believe that it runs on our loop."""
    running = asyncio._get_running_loop()
    if not isinstance(running, GreenLoop):
        yield
        return
    asyncio._set_running_loop(running.outer)
    try:
        yield
    finally:
        running.outer = asyncio._get_running_loop()
        asyncio._set_running_loop(running)


def start_thread(target: Callable[[], object], name: str) -> None:
    """Start a daemon thread, from a thread or an event loop. Raises RuntimeError if the system allows no more."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with out_of_sight():
        thread.start()


class GreenLoop(asyncio.SelectorEventLoop):
    """An event loop in a greenlet: while it waits, the other greenlets of its thread run, and see no running loop."""

    def __init__(self, library: str, threads: Executor) -> None:
        """`threads` calls what the loop must not do itself, such as looking up names."""
        selector = _selector_of(library)
        self._wait = selector.select
        self._let_others_run = _pause_of(library)
        selector.select = self._select  # type: ignore[method-assign]
        self._threads = threads
        self.outer: asyncio.AbstractEventLoop | None = None
        """The loop that runs in this thread apart from this one: the service's own, or eventlet's."""
        super().__init__(selector)

    def _select(self, timeout: float | None = None) -> Any:
        asyncio._set_running_loop(self.outer)
        try:
            if timeout is not None and timeout <= 0:
                self._let_others_run(0)  # gevent's selector would neither do so nor look for input
            return self._wait(timeout)
        finally:
            self.outer = asyncio._get_running_loop()
            asyncio._set_running_loop(self)

    def run_forever(self) -> None:
        self.outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        hooks = sys.get_asyncgen_hooks()
        try:
            super().run_forever()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(self.outer)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        super().close()

    def run_in_executor(  # type: ignore[override]  # a typing detail of its arguments
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        return super().run_in_executor(executor or self._threads, func, *args)


def _pause_of(library: str) -> Callable[[float], object]:
    """The library's own `sleep`."""
    if library == "gevent":
        from gevent import sleep
    else:
        from eventlet import sleep
    return sleep  # type: ignore[no-any-return]


def _selector_of(library: str) -> selectors.BaseSelector:
    """A selector that lets the library's other greenlets run while it waits."""
    if library == "gevent":
        from gevent.selectors import GeventSelector

        return GeventSelector()  # type: ignore[no-any-return]
    from eventlet.green.selectors import SelectSelector

    return SelectSelector()  # type: ignore[no-any-return]
