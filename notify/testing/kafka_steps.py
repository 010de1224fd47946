"""The steps of consumers over Kafka in the crash explorer: before and after the commit that settles a message."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from notify.client.kafka.handling import Handling, PartitionRun
from notify.client.kafka.settling import Settling
from notify.testing.hooks import HOOKS
from notify.testing.step import Place, meet, place_of_handler

_settled: weakref.WeakKeyDictionary[Settling, Place] = weakref.WeakKeyDictionary()
"""The handlers whose messages the next commit settles. Other commits, such as those of a partition's end, come at
unpredictable times, and are not steps."""


def look() -> None:
    """Hear of the consumers of this process."""
    HOOKS.wrap(WRAPPED)


def _note(settling: Settling, run: PartitionRun) -> None:
    place = None if run.handler is None else place_of_handler(run.handler)
    if place is not None:
        _settled[settling] = place


def _settle_noted(hooks: Any, original: Callable[..., None]) -> Callable[..., None]:
    def settle_noted(self: Handling, run: PartitionRun, returned: Sequence[range]) -> None:
        if returned and hooks.run_of_hand(self._hand) is not None:
            _note(self._settling, run)
        original(self, run, returned)

    return settle_noted


def _noted(hooks: Any, original: Callable[..., None]) -> Callable[..., None]:
    def noted(self: Handling, run: PartitionRun, number: int, error: BaseException) -> None:
        if hooks.run_of_hand(self._hand) is not None:
            _note(self._settling, run)
        original(self, run, number, error)

    return noted


def _commit(hooks: Any, original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def commit(self: Settling, windows: Mapping[Any, Any], leaving: list[Any], **options: Any) -> None:
        run = hooks.run_of_hand(self._plan.hand)
        place = None if run is None else _settled.pop(self, None)
        if place is not None:
            meet(run, "before the commit of offsets", place)
        elif run is not None:
            run.check_alive()
        await original(self, windows, leaving, **options)
        if place is not None:
            meet(run, "after the commit of offsets", place)

    return commit


WRAPPED = (
    (Handling, "settle_noted", _settle_noted),
    (Handling, "noted", _noted),
    (Settling, "_commit", _commit),
)
