"""Turns on the event loop for requests of strangers and operators, after those of producers and consumers.

One of them is begun in each turn of the loop, behind everything else that is ready. While the loop is busy with other
work they get a small share of its time, all together: who asks more often, or from more connections, only waits longer.
Addresses take turns with each other, so that one that asks rarely hardly waits. Nothing is refused for it.
"""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from time import perf_counter, thread_time
from typing import Any

READ_SECONDS = 50e-6
"""The cost of reading a request, which is not measured."""
WINDOW_SECONDS = 0.1
"""How often the load of the event loop is measured."""
QUIET_SECONDS = 1.0
"""After this long without requests a larger share does no harm."""
LEAST_PAUSE_SECONDS = 0.001
"""Shorter pauses are added up: the loop's timers have milliseconds."""


class Turns:
    """Begins work of many askers in turn, with a bounded share of the event loop's time."""

    def __init__(
        self,
        least_share: float,
        passed: Callable[[], float] = perf_counter,
        worked: Callable[[], float] = thread_time,
    ) -> None:
        """`least_share` of the loop's time is for this work, however busy the loop is.

        `passed` and `worked`: clocks in seconds, of all time and of this thread's work.
        """
        self._least_share, self.share = least_share, 1.0
        self._passed, self._worked = passed, worked
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._is_due = False
        """The next turn is arranged."""
        self._not_before = 0.0
        """When the next turn may be, by the loop's time, while none is arranged."""
        self._debt_seconds = 0.0
        """Work that no pause was made for yet."""
        self._spent_seconds = 0.0
        """Work since `_looked_at`."""
        self._looked_at, self._worked_at = passed(), worked()

    def wait(self, asker: str, begin: Callable[[], None]) -> None:
        """Call `begin` when it is this asker's turn, maybe now; `asker`: the client's address."""
        self._waiting.setdefault(asker, deque()).append(begin)
        if self._is_due:
            return
        self._is_due = True
        loop = asyncio.get_running_loop()
        pause = self._not_before - loop.time()
        if pause > 0:
            loop.call_later(pause, self._next)
        else:
            self._next()

    async def timed(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await the coroutine that `work` makes, and count its time on the loop."""
        await self._steps(work())

    @types.coroutine
    def _steps(self, coroutine: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
        while True:
            began = self._worked()
            try:
                awaited = resume()
            except StopIteration:
                return
            finally:
                self._spend(self._worked() - began)
            try:
                yield awaited
            except BaseException as error:
                thrown = error
                resume = lambda: coroutine.throw(thrown)  # noqa: B023, E731
            else:
                resume = lambda: coroutine.send(None)  # noqa: E731

    def _spend(self, seconds: float) -> None:
        self._debt_seconds += seconds
        self._spent_seconds += seconds

    def _next(self) -> None:
        asker = next(iter(self._waiting))
        theirs = self._waiting.pop(asker)
        begin = theirs.popleft()
        if theirs:
            self._waiting[asker] = theirs  # after the others
        self._spend(READ_SECONDS)
        try:
            begin()
        finally:
            asyncio.get_running_loop().call_soon(self._begun)  # after the first step of the task that `begin` made

    def _begun(self) -> None:
        loop = asyncio.get_running_loop()
        pause = self._pause()
        if self._waiting:
            loop.call_later(pause, self._next)
        else:
            self._is_due = False
            self._not_before = loop.time() + pause

    def _pause(self) -> float:
        """The seconds until the next turn."""
        now = self._passed()
        if now - self._looked_at > WINDOW_SECONDS:
            self._look_at_loop(now)
        pause = self._debt_seconds * (1.0 - self.share) / self.share
        if pause < LEAST_PAUSE_SECONDS:
            return 0.0
        self._debt_seconds = 0.0
        return pause

    def _look_at_loop(self, now: float) -> None:
        """Set the share by the part of its time in which the loop's thread did other work."""
        passed, worked = now - self._looked_at, self._worked()
        others = max(0.0, worked - self._worked_at - self._spent_seconds) / passed
        # The third power, because the measure is too low: others do less while they wait for this work.
        left = max(self._least_share, max(0.0, 1.0 - others) ** 3)
        # Down immediately, up slowly: otherwise others would repeatedly lose their time.
        is_rise = left > self.share and passed < QUIET_SECONDS
        self.share = self.share + 0.2 * (left - self.share) if is_rise else left
        self._looked_at, self._worked_at, self._spent_seconds = now, worked, 0.0
