"""Lanes: a Batcher for each shard, so that a log that is slow or away delays only its own items."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from notify.client.batch import Along, Batcher, Later
from notify.errors import NotifyError, Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lanes(Generic[Item, Result]):
    """Gathers items into requests, each for one shard; items of the shard None go to any server."""

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

        `in_flight`: the most concurrent requests of a lane. If the keys are divided among shards (`count_key_shards`
        returns their number), these shards share a quarter of `in_flight`, at least one each: their requests run beside
        one another, and more concurrent requests would only be smaller.
        """
        self._send = send
        self._count_key_shards = count_key_shards
        self._in_flight = in_flight
        self._may_go_along = may_go_along
        self._bounds = bounds
        self._lanes: dict[str | None, Batcher[Item, Result]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no item waits and none is on its way. Any thread may ask."""
        return all(lane.is_idle for lane in list(self._lanes.values()))

    def is_about_to_send(self, shard: str | None) -> bool:
        """`Batcher.is_about_to_send` of the shard's Batcher."""
        lane = self._lanes.get(shard)
        return lane is not None and lane.is_about_to_send

    def submit(self, item: Item, shard: str | None) -> asyncio.Future[Result]:
        """Queue an item and return the future of its result. Raises Unavailable if too many items wait already."""
        lane = self._lanes.get(shard) or self._lane(shard)
        return lane.submit(item)

    def along(self, shard: str | None, most: int) -> AbstractContextManager[Along[Item, Result]]:
        """`Batcher.along` of the shard's Batcher."""
        return self._lane(shard).along(most)

    def _lane(self, shard: str | None) -> Batcher[Item, Result]:
        lane = self._lanes.get(shard)
        if lane is None:
            key_shards = self._count_key_shards() if shard is not None else 0
            in_flight = max(1, self._in_flight // (4 * key_shards)) if key_shards else self._in_flight
            send = functools.partial(self._send, shard)
            may_go_along = functools.partial(self._may_go_along, shard)
            lane = Batcher(send, in_flight=in_flight, may_go_along=may_go_along, **self._bounds)
            self._lanes[shard] = lane
        return lane

    async def drain(self) -> None:
        """Wait until no item waits and none is on its way."""
        for lane in list(self._lanes.values()):
            await lane.drain()


async def by_shard(
    items: list[Item],
    shard_of: Callable[[Item], str | None],
    send: Callable[[str | None, list[Item]], Awaitable[Sequence[Result | Later | NotifyError]]],
) -> Sequence[Result | Later | NotifyError]:
    """Send items to their shards at the same time and return the results, in the order of `items`.

    If a shard is away, the error is the result of its items only. Other errors of a request are raised.
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
