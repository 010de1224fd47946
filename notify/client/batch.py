"""Group commit in the caller: while one request is on its way, everything that waits goes into the next.

No linger and no knob: alone, an item leaves at once; under load, batches are as large as the server is slow. A request
takes all that waits, and leaves no share to the next one beside it: requests of half the size, so that client and
server work at the same time, cost both a sixth more CPU with 128 callers and brought no rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from notify.errors import InvalidRequest, NotifyError, Unavailable

log = logging.getLogger("notify.client")

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WAITING = 100_000
LATER_LOOK_SECONDS = 0.02
CARRIER_TURNS = 3
"""So many turns of the loop an item waits for another Batcher's request that is about to leave."""


class Later:
    """In place of a result: the item is to be sent again after so many seconds, with whatever waits then."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Along(Generic[Item, Result]):
    """Items of a Batcher in a request of another one; without `results` they are sent by their own."""

    __slots__ = ("items", "results")

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.results: Sequence[Result] | None = None
        """One for each item, in order."""


class Batcher(Generic[Item, Result]):
    """Gathers items into requests.

    `send` gets a list and returns one for each item, in order: its result, Later, or an error of this item alone.
    """

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[Sequence[Result | Later | NotifyError]]],
        *,
        max_items: int = 1000,
        max_bytes: int = 4 << 20,
        size_of: Callable[[Item], int] = lambda item: 0,
        in_flight: int = 2,
        may_go_along: Callable[[], bool] = lambda: False,
    ) -> None:
        """`may_go_along`: whether another Batcher's request is about to leave, which may take `along` what waits here;
        that is waited for, CARRIER_TURNS at most."""
        self._send = send
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._in_flight = in_flight
        self._may_go_along = may_go_along
        self._running: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._returned: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        """Came back from another Batcher's request, and are not taken along again: only a request of their own is
        sent a bounded number of times."""
        self._scheduled = False
        self._unbegun = 0
        """Requests whose task has not begun."""
        self._away = 0
        """How many items are to be sent again after a while, or are on their way in another Batcher's request."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is on its way; as any thread sees it at this moment."""
        return not (self._waiting or self._running or self._away or self._returned)

    @property
    def is_about_to_send(self) -> bool:
        """Whether a request leaves in this turn of the loop or the next."""
        return self._scheduled or self._unbegun > 0

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """The future of the item's result. Raises Unavailable where far too much waits already."""
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable("too much waits to be sent; the server is slow or away")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._append(item, future)
        return future

    def _append(self, item: Item, future: asyncio.Future[Result]) -> None:
        self._waiting.append((item, future))
        self._start_later()

    def _again(self, item: Item, future: asyncio.Future[Result]) -> None:
        self._away -= 1
        self._append(item, future)

    @contextlib.contextmanager
    def along(self, most: int) -> Iterator[Along[Item, Result]]:
        """The items that wait, for another Batcher's request, or none where there are more than `most`; whoever waits
        for them is told at the end of this context."""
        waiting = self._waiting
        entries = [waiting.popleft() for _ in range(len(waiting))] if len(waiting) <= most else []
        taken: Along[Item, Result] = Along([item for item, _ in entries])
        self._away += len(entries)
        ended: asyncio.CancelledError | None = None
        try:
            yield taken
        except asyncio.CancelledError as error:
            ended = error
            raise
        finally:
            self._away -= len(entries)
            if ended is not None:
                self._end(ended, entries)
            elif taken.results is not None:
                self._tell(entries, taken.results)
            else:
                self._returned += entries
                self._start_later()

    def _start_later(self) -> None:
        if not self._scheduled and len(self._running) < self._in_flight:
            self._scheduled = True
            self._loop.call_soon(self._start_or_wait, CARRIER_TURNS)

    def _start_or_wait(self, turns: int) -> None:
        if turns and self._may_go_along():
            self._loop.call_soon(self._start_or_wait, turns - 1)
        else:
            self._start()

    def _start(self) -> None:
        self._scheduled = False
        while (self._waiting or self._returned) and len(self._running) < self._in_flight:
            task = self._loop.create_task(self._request(self._take()))
            self._running.add(task)
            self._unbegun += 1

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        waiting = self._returned or self._waiting
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        while waiting and len(batch) < self._max_items:
            size += self._size_of(waiting[0][0])
            if batch and size > self._max_bytes:
                break
            entry = waiting.popleft()
            if not entry[1].done():
                batch.append(entry)
        return batch

    async def _request(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        self._unbegun -= 1
        try:
            if batch:
                self._tell(batch, await self._results([item for item, _ in batch]))
        except asyncio.CancelledError as error:
            self._end(error, batch)
            raise
        except BaseException as error:
            told = _told(error)
            for _, future in batch:
                _refuse(future, told)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._running.discard(task)
            self._start()

    def _end(self, error: asyncio.CancelledError, entries: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        """The loop ends, and has cancelled a request: these entries and all that waits are told, and nothing is begun
        that the loop would not see through."""
        told = _told(error)
        for entry in (*entries, *self._returned, *self._waiting):
            _refuse(entry[1], told)
        self._returned.clear()
        self._waiting.clear()

    def _tell(
        self, batch: list[tuple[Item, asyncio.Future[Result]]], results: Sequence[Result | Later | NotifyError]
    ) -> None:
        for (item, future), result in zip(batch, results, strict=True):
            if isinstance(result, Later):
                self._away += 1
                self._loop.call_later(result.seconds, self._again, item, future)
            elif isinstance(result, NotifyError):
                _refuse(future, result)
            elif not future.done():
                future.set_result(result)

    async def _results(self, items: list[Item]) -> Sequence[Result | Later | NotifyError]:
        """One result each. A request that is refused for what is in it, by a server, a proxy or the encoder, is sent
        again in two parts, down to the item: n items are at most 2n - 1 requests."""
        try:
            return await self._send(items)
        except (InvalidRequest, TypeError, ValueError, ArithmeticError) as error:
            if len(items) == 1:
                return [_told(error)]
        middle = len(items) // 2
        return [*await self._part(items[:middle]), *await self._part(items[middle:])]

    async def _part(self, items: list[Item]) -> Sequence[Result | Later | NotifyError]:
        """As `_results`; what concerns no single item, is said to each of these, and not to the other part's."""
        try:
            return await self._results(items)
        except NotifyError as error:
            return [error] * len(items)

    async def drain(self) -> None:
        """Wait until nothing waits and nothing is on its way."""
        while not self.is_idle:
            if self._running:
                await asyncio.wait(list(self._running))
            else:
                await asyncio.sleep(LATER_LOOK_SECONDS if self._away else 0)


def _told(error: BaseException) -> NotifyError:
    """The error for those who wait; the log has the traceback of what no server or connection answers with."""
    if isinstance(error, NotifyError):
        return error
    if not isinstance(error, asyncio.CancelledError):
        log.error("a request failed for no known reason", exc_info=error)
    told = Unavailable(f"the request failed: {error!r}")
    told.__cause__ = error
    return told


def _refuse(future: asyncio.Future[Any], error: NotifyError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever stopped waiting need not be told by the loop's logger
