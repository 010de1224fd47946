"""How signals end a process: a first SIGTERM or Ctrl-C stops it gracefully, a second one ends it immediately. So does
SIGHUP, which the end of a terminal sends, unless `nohup` or the program has given it another meaning.

The second one loses nothing that was acknowledged, since not even kill -9 does. And how a stop ends work of a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 0.1
"""Signals within this time count as one wish: a terminal sends Ctrl-C to a program and to its parents, which pass it
on."""


class StopRequests:
    """Counts how often signals have asked the process to end."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds."""
        self._monotonic = monotonic
        self._count = 0
        self._heard_at = float("-inf")

    def count(self) -> int:
        """Note a signal and return the number of the wish that it belongs to, from 1."""
        now = self._monotonic()
        if now - self._heard_at >= SAME_REQUEST_SECONDS:
            self._count += 1
            self._heard_at = now
        return self._count


class Signals:
    """Notes signals, for code that handles them later."""

    def __init__(self) -> None:
        self._wishes = StopRequests()
        self._noted: list[tuple[int, int]] = []

    def note(self, number: int, _: object) -> None:
        """The signal handler."""
        self._noted.append((number, self._wishes.count()))

    def taken(self) -> list[tuple[int, int]]:
        """The signals since the last call: for each its number, and the number of the wish that it belongs to."""
        noted, self._noted = self._noted, []
        return noted


def end_by(number: int) -> NoReturn:
    """End this process by a signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container: the system keeps default actions from it


@contextlib.contextmanager
def heeding_signals(stop: Callable[[], object], cut: Callable[[int], object] = end_by) -> Iterator[None]:
    """Within this context, the first SIGTERM, SIGINT or SIGHUP calls `stop`, the second one calls `cut` with the
    signal's number, and the third one ends the process.

    Use it in the main thread. `stop` and `cut` run within a signal handler: they may set an event, or call an event
    loop's `call_soon_threadsafe`.
    """
    wishes = StopRequests()

    def heed(number: int, _: object) -> None:
        count = wishes.count()
        if count > 2:
            end_by(number)
        elif count == 2:
            cut(number)
        else:
            stop()

    hangup = (signal.SIGHUP,) if _ends_at_hangup() else ()
    with _handled_by(dict.fromkeys((*SIGNALS, *hangup), heed)):
        yield


def stop_at_hangup() -> None:
    """Let SIGHUP mean SIGTERM from now on, unless it has a meaning already. Call it in the main thread."""
    if _ends_at_hangup():
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def _ends_at_hangup() -> bool:
    return signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@contextlib.contextmanager
def _handled_by(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Within this context, each of these signals has its handler.

    A child that is forked meanwhile inherits the handlers, which mean its parent: in the child the previous ones act.
    Otherwise `Process.terminate()` of a handler of messages would not end its child.
    """
    home = os.getpid()

    def heed(number: int, frame: object) -> None:
        if os.getpid() == home:
            handlers[number](number, frame)
        else:
            signal.signal(number, previous[number] or signal.SIG_DFL)
            signal.raise_signal(number)

    previous: dict[int, Any] = {number: signal.signal(number, heed) for number in handlers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that is not Python's, such as uWSGI's


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """Within this context, SIGTERM and SIGHUP raise SystemExit, so that a program that starts processes ends them, as
    it does at Ctrl-C. A second signal ends the program immediately.

    SIGHUP stays ignored where `nohup` has it ignored. SIGINT raises KeyboardInterrupt also in a background job of a
    shell, which ignores it. Use it in the main thread; in another one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wishes = StopRequests()
    is_exiting = False

    def heed(number: int, _: object) -> None:
        nonlocal is_exiting
        if wishes.count() > 1:
            end_by(number)
        elif not is_exiting:
            is_exiting = True
            raise SystemExit(128 + number)

    handlers: dict[int, Any] = {signal.SIGTERM: heed, signal.SIGINT: signal.default_int_handler}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = heed
    with _handled_by(handlers):
        yield


def run_until_signal(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run a coroutine on a new event loop until it ends, or a signal cancels it. Raises the coroutine's exception."""
    is_stopped = False
    running: asyncio.Task[object] | None = None

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        if running is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine has ended
                running.get_loop().call_soon_threadsafe(running.cancel)

    async def run() -> None:
        nonlocal running
        running = asyncio.ensure_future(work())
        if is_stopped:
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            if not is_stopped:
                raise

    with heeding_signals(stop):
        asyncio.run(run())


async def done_before(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Whether some work was done before an event was set, which cancels it. Raises what the work raises."""
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([doing, waiting], return_when=asyncio.FIRST_COMPLETED)
        is_done = doing.done()
    finally:
        doing.cancel()
        waiting.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)
    if is_done:
        doing.result()
    return is_done
