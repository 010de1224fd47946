"""Partitions come and go: their windows open where the group is, and close with what was done committed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from notify.client.handler_threads import HandlerThreads
from notify.client.kafka.control import Orders
from notify.client.kafka.handling import NAMED_IN_LOG, Handling
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.settling import Settling
from notify.client.kafka.window import Window
from notify.errors import NotifyError
from notify.kafka.groups import OWN_TOPICS
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place as NotedPlace
from notify.kafka.subscriptions import Subscribed, Subscriptions
from notify.kafka.topic_ids import TopicIds

log = logging.getLogger("notify.consumer")

REVOKE_SECONDS = 120.0
"""The group waits for the handlers of a partition that is to be another's: `lease` seconds, and at most so long."""


class Assignment:
    """Belongs to the event loop."""

    def __init__(
        self,
        plan: Plan,
        partitions: Partitions,
        handling: Handling,
        settling: Settling,
        orders: Orders,
        noted: Subscriptions | None,
        ids: TopicIds,
        threads: HandlerThreads,
    ) -> None:
        """`threads` note what is for audits."""
        self._plan = plan
        self._partitions = partitions
        self._handling = handling
        self._settling = settling
        self._orders = orders
        self._noted = noted
        self._ids = ids
        self._threads = threads

    async def open(self, known: Mapping[Place, Progress | None], begun: Mapping[Place, int]) -> dict[Place, int]:
        """Open windows: where the group is known to be, else where it begins. The offsets to fetch from.

        A beginning is committed before anything is fetched, so that a kill on the first message loses nothing.
        """
        await self._note({p: k.offset for p, k in known.items() if k is not None})
        await self._note(begun, begins=True)
        for place, progress in known.items():
            if progress is None:
                progress = self.beginning(place, begun[place])
            window = self._open(place, progress)
            window.changes += progress.left  # from now on it is not left in peace if this process dies
        await self._settling.settle()
        return {place: window.position for place, window in self._partitions.items() if place in known}

    def beginning(self, place: Place, offset: int) -> Progress:
        """Progress of a group that begins: a reset from before counts as carried out."""
        reset = self._orders.control.reset_of(place[0])
        return Progress(offset, reset=reset.id if reset else "", left=True)

    async def move(self, begun: Mapping[Place, int], reset: str) -> dict[Place, int]:
        """Have partitions go on elsewhere, as a reset says."""
        await self._note(begun, begins=True)
        for place, offset in begun.items():
            self._partitions.close([place])
            self._open(place, Progress(offset, reset=reset, left=True)).changes += 1
        await self._settling.settle()
        return dict(begun)

    async def revoke(self, places: Sequence[Place]) -> None:
        """Partitions will be another's: wait for their handlers, commit what is done."""
        windows = [window for place, window in self._partitions.items() if place in set(places)]
        for window in windows:
            window.stop()
        left = await self._handling.finished(min(self._plan.lease, REVOKE_SECONDS), windows)
        if left:
            log.warning(
                "%d messages of partitions that another instance gets are still being handled, and are handled there "
                "again: %s", len(left), ", ".join(left[:NAMED_IN_LOG]),
            )  # fmt: skip
        self._handling.let_go(windows)
        await self._settling.settle()
        self._partitions.close(places)

    async def lose(self, places: Sequence[Place]) -> None:
        """Partitions are another's already: nothing of theirs is committed."""
        if places:
            log.warning("%d partitions were lost: what was not committed is handled again elsewhere", len(places))
        self._handling.let_go(window for place, window in self._partitions.items() if place in set(places))
        self._partitions.close(places)

    async def renew(self) -> None:
        """Commit and note anew where the group is, though nothing has changed.

        Kafka forgets the offset of a partition that was not committed for a week where the group has no members, as an
        owner's group has none, or where it rests.
        """
        self._settling.renew()
        await self._note({place: window.position for place, window in self._partitions.items()}, renews=True)

    def _open(self, place: Place, progress: Progress) -> Window:
        handler = self._plan.handler_of(place[0])
        progress = replace(progress, topic=self._ids.of(place[0]))
        return self._partitions.open(place, progress, in_order=handler is not None and handler.mode == "ordered")

    def places(self) -> list[Place]:
        return [place for place, _ in self._partitions.items()]

    def has(self, place: Place) -> bool:
        return self._partitions.get(place) is not None

    async def _note(self, offsets: Mapping[Place, int], *, begins: bool = False, renews: bool = False) -> None:
        """Note what this group takes from partitions, for audits: they judge nothing without it."""
        subscribed = {}
        inbox_from_us = time.time_ns() // 1000 if self._plan.has_inbox else -1
        for place, offset in offsets.items():
            handler = self._plan.handler_of(place[0])
            if handler is not None and not place[0].startswith(OWN_TOPICS):
                subscribed[NotedPlace(*place)] = Subscribed(
                    handler.mode, offset, handler.tags, handler.filter, inbox_from_us=inbox_from_us,
                    topic_id=self._ids.of(place[0]),
                )  # fmt: skip
        if self._noted is None or not subscribed:
            return
        try:
            note = partial(self._noted.note, subscribed, begins=begins, renews=renews)
            await asyncio.get_running_loop().run_in_executor(self._threads, note)
        except NotifyError as error:
            log.warning("the subscriptions could not be noted for audits: %s", error)
