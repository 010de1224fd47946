"""One Batcher for each log that requests go to: a log that is slow or away holds up only what is its own."""

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
        """`send` gets a shard and its items, and returns as a Batcher's does; `bounds`: those of each Batcher, and
        `may_go_along`, too, asked for a shard.

        `in_flight`: requests at once. The shards that divide the keys (`count_key_shards` says how many do) share a
        quarter of them, at least one each: the other shards' requests are on their way as well, and more requests at
        once would only be smaller ones.
        """
        self._send = send
        self._count_key_shards = count_key_shards
        self._in_flight = in_flight
        self._may_go_along = may_go_along
        self._bounds = bounds
        self._lanes: dict[str | None, Batcher[Item, Result]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is on its way; as any thread sees it at this moment."""
        return all(lane.is_idle for lane in list(self._lanes.values()))

    def is_about_to_send(self, shard: str | None) -> bool:
        """As `Batcher.is_about_to_send`, for a shard."""
        lane = self._lanes.get(shard)
        return lane is not None and lane.is_about_to_send

    def submit(self, item: Item, shard: str | None) -> asyncio.Future[Result]:
        """The future of the item's result. Raises Unavailable where far too much waits already."""
        return self._lane(shard).submit(item)

    def along(self, shard: str | None, most: int) -> AbstractContextManager[Along[Item, Result]]:
        """As `Batcher.along`, of the items that go to this shard."""
        return self._lane(shard).along(most)

    def _lane(self, shard: str | None) -> Batcher[Item, Result]:
        lane = self._lanes.get(shard)
        if lane is None:
            divided = self._count_key_shards() if shard is not None else 0
            most = max(1, self._in_flight // (4 * divided)) if divided else self._in_flight
            send = functools.partial(self._send, shard)
            may_go = functools.partial(self._may_go_along, shard)
            lane = self._lanes[shard] = Batcher(send, in_flight=most, may_go_along=may_go, **self._bounds)
        return lane

    async def drain(self) -> None:
        """Wait until nothing waits and nothing is on its way."""
        for lane in list(self._lanes.values()):
            await lane.drain()


async def by_shard(
    items: list[Item],
    shard_of: Callable[[Item], str | None],
    send: Callable[[str | None, list[Item]], Awaitable[Sequence[Result | Later | NotifyError]]],
) -> Sequence[Result | Later | NotifyError]:
    """The results of items that are sent to their shards at the same time, in the order of `items`.

    A shard that is away is the result of its own items alone. Raises what is wrong with a request.
    """
    places: dict[str | None, list[int]] = {}
    for number, item in enumerate(items):
        places.setdefault(shard_of(item), []).append(number)
    if len(places) == 1:
        return await send(next(iter(places)), items)
    calls = [_or_away(send(shard, [items[n] for n in numbers])) for shard, numbers in places.items()]
    answers = await asyncio.gather(*calls)
    results: dict[int, Result | Later | NotifyError] = {}
    for numbers, answer in zip(places.values(), answers, strict=True):
        told = [answer] * len(numbers) if isinstance(answer, NotifyError) else answer
        results.update(zip(numbers, told, strict=True))
    return [results[number] for number in range(len(items))]


async def _or_away(
    answer: Awaitable[Sequence[Result | Later | NotifyError]],
) -> Sequence[Result | Later | NotifyError] | Unavailable:
    try:
        return await answer
    except Unavailable as error:
        return error
