"""Batcher: group commit on the client's side. While a request is on its way, new items wait for the next request.

There is no linger time to set. A single item leaves immediately; under load, the slower the server, the larger the
batches. A request takes all items that wait. Two requests of half the size, so that client and server work at the same
time, cost a sixth more CPU on both sides with 128 callers and did not raise the rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from notify.errors import ForeignAnswer, InvalidRequest, NotifyError, TooLarge, Unavailable
from notify.runtime.program_log import program_log

log = program_log("notify.client")

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WAITING = 100_000
LATER_LOOK_SECONDS = 0.02
SMALLER_SECONDS = 600.0
"""How long requests stay smaller after one was too large for a proxy in between."""
PROXY_BOUND = "proxy_bound"
"""The code of an item that alone is too large for a proxy in between."""
CARRIER_TURNS = 3
"""The most turns of the loop that an item waits for another Batcher's request that is about to leave."""


class Later:
    """Takes the place of a result: the item is sent again after `seconds`, with the items that wait then."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Along(Generic[Item, Result]):
    """Items of one Batcher in another Batcher's request; without `results`, their own Batcher sends them."""

    __slots__ = ("items", "results")

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.results: Sequence[Result] | None = None
        """The result of each item, in the order of the items."""


class Batcher(Generic[Item, Result]):
    """Gathers items into requests.

    `send` gets a list of items and returns for each, in order, its result, Later, or an error of this item alone.
    """

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[Sequence[Result | Later | NotifyError]]],
        *,
        max_items: int = 1000,
        max_bytes: int = 4 << 20,
        size_of: Callable[[Item], int] = lambda item: 0,
        in_flight: int = 2,
        in_order: bool = False,
        may_go_along: Callable[[], bool] = lambda: False,
    ) -> None:
        """`in_order`: no item leaves before those that left earlier are answered, so that none overtakes them; then
        `in_flight` has no effect. `may_go_along`: whether another Batcher's request is about to leave that can include
        this Batcher's items; they wait for that request, CARRIER_TURNS at most."""
        self._send = send
        self._bounds = max_items, max_bytes
        self._max_items, self._max_bytes = self._bounds
        self._smaller_until: float | None = None
        """Until when (the loop's time) requests are smaller than the bounds, because a proxy takes no larger ones."""
        self._size_of = size_of
        self._in_flight = 1 if in_order else in_flight
        self._in_order = in_order
        self._may_go_along = may_go_along
        self._running: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._returned: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        """Items that came back from another Batcher's request. They are not included in one again, because only their
        own Batcher's request is repeated a bounded number of times."""
        self._scheduled = False
        self._unbegun = 0
        """The number of requests whose task has not begun."""
        self._away = 0
        """The number of items that wait to be sent again, or are on their way in another Batcher's request."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_idle(self) -> bool:
        """Whether no item waits and none is on its way. Any thread may ask."""
        return not (self._waiting or self._running or self._away or self._returned)

    @property
    def is_about_to_send(self) -> bool:
        """Whether a request leaves in this turn of the loop or the next."""
        return self._scheduled or self._unbegun > 0

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """Queue an item and return the future of its result. Raises Unavailable if MAX_WAITING items wait already."""
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable("too many messages wait to be sent; the server is slow or unreachable")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled:
            self._start_later()
        return future

    def _again(self, item: Item, future: asyncio.Future[Result]) -> None:
        self._away -= 1
        self._waiting.append((item, future))
        self._start_later()

    @contextlib.contextmanager
    def along(self, most: int) -> Iterator[Along[Item, Result]]:
        """Lend the items that wait to another Batcher's request; no items if more than `most` wait, or if they have to
        wait for earlier ones.

        Their futures get the results at the end of this context.
        """
        waiting = self._waiting
        may_leave = len(waiting) <= most and not (self._in_order and (self._running or self._away or self._returned))
        entries = [waiting.popleft() for _ in range(len(waiting))] if may_leave else []
        lent: Along[Item, Result] = Along([item for item, _ in entries])
        self._away += len(entries)
        is_cancelled = False
        try:
            yield lent
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            self._away -= len(entries)
            if is_cancelled:
                self._returned += entries  # nothing is begun: see _request
            elif lent.results is not None:
                self._deliver(entries, lent.results)
                if self._in_order and entries and self._waiting:
                    self._start_later()
            else:
                self._returned += entries
                self._start_later()

    def refuse_waiting(self, error: NotifyError) -> None:
        """Give up the items that have not left yet: their futures get this error."""
        for waiting in (self._returned, self._waiting):
            while waiting:
                _refuse(waiting.popleft()[1], error)

    @property
    def _may_start(self) -> bool:
        return len(self._running) < self._in_flight and not (self._in_order and self._away)

    def _start_later(self) -> None:
        if not self._scheduled and self._may_start:
            self._scheduled = True
            self._loop.call_soon(self._start_or_wait, CARRIER_TURNS)

    def _start_or_wait(self, turns: int) -> None:
        if turns and self._may_go_along():
            self._loop.call_soon(self._start_or_wait, turns - 1)
        else:
            self._start()

    def _start(self) -> None:
        self._scheduled = False
        while (self._waiting or self._returned) and self._may_start:
            batch = self._take()
            task = self._loop.create_task(self._request(batch))
            self._running.add(task)
            self._unbegun += 1
            task.add_done_callback(functools.partial(self._let_go, batch))

    def _let_go(self, batch: list[tuple[Item, asyncio.Future[Result]]], task: asyncio.Task[None]) -> None:
        """Drop a request that was cancelled before it began: `_request` did not run and set no result."""
        if task in self._running:
            self._running.discard(task)
            self._unbegun -= 1
            for _, future in batch:
                _refuse(future, Unavailable("the request was cancelled before it began"))

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        if self._smaller_until is not None and self._loop.time() > self._smaller_until:
            self._smaller_until = None
            self._max_items, self._max_bytes = self._bounds
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
        is_cancelled = False
        try:
            if batch:
                self._deliver(batch, await self._results([item for item, _ in batch]))
        except BaseException as error:
            failure = _as_notify_error(error)
            for _, future in batch:
                _refuse(future, failure)
            if isinstance(error, asyncio.CancelledError):
                is_cancelled = True
                raise
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._running.discard(task)
            # The loop ends, most likely, and would not see through what is begun now: `submit` and `drain` begin again.
            if not is_cancelled:
                if not self._in_order:
                    self._start()
                elif self._waiting or self._returned:
                    self._start_later()  # after the callbacks of these futures

    def _deliver(
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
        """The result of each item. If a server, a proxy or the encoder refuses the content of a request, it is sent
        again in two parts, down to single items: n items make at most 2n - 1 requests."""
        try:
            return await self._send(items)
        except ForeignAnswer as error:
            if not error.is_for_size or (len(items) == 1 and not error.answered):
                raise
            self._become_smaller(items)
            if len(items) == 1:
                return [TooLarge(str(error), PROXY_BOUND)]
        except (InvalidRequest, TypeError, ValueError, ArithmeticError) as error:
            if len(items) == 1:
                return [_as_notify_error(error)]
        middle = len(items) // 2
        return [*await self._part(items[:middle]), *await self._part(items[middle:])]

    def _become_smaller(self, items: list[Item]) -> None:
        """Make the next requests half as large as one with these items, which a proxy does not take."""
        self._smaller_until = self._loop.time() + SMALLER_SECONDS
        size = sum(map(self._size_of, items))
        if size:
            self._max_bytes = min(self._max_bytes, size // 2)
        else:
            self._max_items = max(1, min(self._max_items, len(items) // 2))

    async def _part(self, items: list[Item]) -> Sequence[Result | Later | NotifyError]:
        """Like `_results`, but a failure of the whole request becomes the result of each item of this part."""
        try:
            return await self._results(items)
        except NotifyError as error:
            return [error] * len(items)

    async def drain(self) -> None:
        """Wait until no item waits and none is on its way."""
        while not self.is_idle:
            if self._running:
                await asyncio.wait(list(self._running))
            else:
                if self._waiting or self._returned:
                    self._start_later()
                await asyncio.sleep(LATER_LOOK_SECONDS if self._away else 0)


def _as_notify_error(error: BaseException) -> NotifyError:
    """The error for the futures of a request. An error of an unexpected type is logged with its traceback."""
    if isinstance(error, NotifyError):
        return error
    if not isinstance(error, asyncio.CancelledError):
        log.error("a request failed for no known reason", exc_info=error)
    failure = Unavailable(f"the request failed: {error!r}")
    failure.__cause__ = error
    return failure


def _refuse(future: asyncio.Future[Any], error: NotifyError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved: otherwise the loop logs an error if the caller stopped waiting


class ShardBatchers(Generic[Item, Result]):
    """A Batcher for each shard, so that a log that is slow or away delays only its own items. Items of the shard None
    go to any server."""

    def __init__(
        self,
        send: Callable[[str | None, list[Item]], Awaitable[Sequence[Result | Later | NotifyError]]],
        count_key_shards: Callable[[], int],
        *,
        in_flight: int = 2,
        may_go_along: Callable[[str | None], bool] = lambda shard: False,
        **bounds: Any,
    ) -> None:
        """`send` gets a shard and its items, and returns the same as the `send` of a Batcher. `may_go_along` is a
        Batcher's too, but gets the shard. `bounds`: further arguments of each Batcher.

        `in_flight`: the most concurrent requests of a shard. If the keys are divided among shards (`count_key_shards`
        returns their number), these shards share a quarter of `in_flight`, at least one each: their requests run
        concurrently, and more concurrent requests would only be smaller.
        """
        self._send = send
        self._count_key_shards = count_key_shards
        self._in_flight = in_flight
        self._may_go_along = may_go_along
        self._bounds = bounds
        self._batchers: dict[str | None, Batcher[Item, Result]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no item waits and none is on its way. Any thread may ask."""
        return all(batcher.is_idle for batcher in list(self._batchers.values()))

    def is_about_to_send(self, shard: str | None) -> bool:
        """`Batcher.is_about_to_send` of the shard's Batcher."""
        batcher = self._batchers.get(shard)
        return batcher is not None and batcher.is_about_to_send

    def submit(self, item: Item, shard: str | None) -> asyncio.Future[Result]:
        """Queue an item and return the future of its result. Raises Unavailable if too many items wait already."""
        batcher = self._batchers.get(shard) or self._batcher(shard)
        return batcher.submit(item)

    def along(self, shard: str | None, most: int) -> AbstractContextManager[Along[Item, Result]]:
        """`Batcher.along` of the shard's Batcher."""
        return self._batcher(shard).along(most)

    def _batcher(self, shard: str | None) -> Batcher[Item, Result]:
        batcher = self._batchers.get(shard)
        if batcher is None:
            key_shards = self._count_key_shards() if shard is not None else 0
            in_flight = max(1, self._in_flight // (4 * key_shards)) if key_shards else self._in_flight
            send = functools.partial(self._send, shard)
            may_go_along = functools.partial(self._may_go_along, shard)
            batcher = Batcher(send, in_flight=in_flight, may_go_along=may_go_along, **self._bounds)
            self._batchers[shard] = batcher
        return batcher

    def refuse_waiting(self, error: NotifyError) -> None:
        """`Batcher.refuse_waiting` of each shard's Batcher."""
        for batcher in self._batchers.values():
            batcher.refuse_waiting(error)

    async def drain(self) -> None:
        """Wait until no item waits and none is on its way."""
        for batcher in list(self._batchers.values()):
            await batcher.drain()


async def by_shard(
    items: list[Item],
    shard_of: Callable[[Item], str | None],
    send: Callable[[str | None, list[Item]], Awaitable[Sequence[Result | Later | NotifyError]]],
) -> Sequence[Result | Later | NotifyError]:
    """Send items to their shards at the same time and return the results, in the order of `items`.

    If a shard is unreachable, the error is the result of its items only. Other errors of a request are raised.
    """
    shards = list(map(shard_of, items))
    if shards.count(shards[0]) == len(shards):
        return await send(shards[0], items)
    numbers_by_shard: dict[str | None, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers_by_shard.setdefault(shard, []).append(number)
    calls = [_or_away(send(shard, [items[n] for n in numbers])) for shard, numbers in numbers_by_shard.items()]
    answers = await asyncio.gather(*calls)
    results: dict[int, Result | Later | NotifyError] = {}
    for numbers, answer in zip(numbers_by_shard.values(), answers, strict=True):
        shard_results = [answer] * len(numbers) if isinstance(answer, NotifyError) else answer
        results.update(zip(numbers, shard_results, strict=True))
    return [results[number] for number in range(len(items))]


async def _or_away(
    answer: Awaitable[Sequence[Result | Later | NotifyError]],
) -> Sequence[Result | Later | NotifyError] | Unavailable:
    try:
        return await answer
    except Unavailable as error:
        return error
