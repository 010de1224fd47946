"""Assignment: opens the windows of new partitions at the group's progress, and closes them after a last commit."""

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
"""The longest wait for the handlers of a revoked partition, if `lease` is longer: the whole group waits for them."""


class Assignment:
    """Opens, moves and closes partitions. Belongs to the event loop."""

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
        """`threads` write the notes for audits."""
        self._plan = plan
        self._partitions = partitions
        self._handling = handling
        self._settling = settling
        self._orders = orders
        self._noted = noted
        self._ids = ids
        self._threads = threads

    async def open(self, known: Mapping[Place, Progress | None], begun: Mapping[Place, int]) -> dict[Place, int]:
        """Open windows at the group's progress, or where the group begins. Returns the offsets to fetch from.

        `known`: the progress of each partition, None if it has none; `begun`: the offset where the group begins there.
        This offset is committed before anything is fetched, so that a kill on the first message loses nothing.
        """
        await self._note({place: progress.offset for place, progress in known.items() if progress is not None})
        await self._note(begun, begins=True)
        for place, progress in known.items():
            if progress is None:
                progress = self.beginning(place, begun[place])
            window = self._open(place, progress)
            window.changes += progress.left  # commit that the partition is in use, in case this process dies
        await self._settling.settle()
        return {place: window.position for place, window in self._partitions.items() if place in known}

    def beginning(self, place: Place, offset: int) -> Progress:
        """The progress of a group that begins at this offset; the topic's last reset counts as carried out."""
        reset = self._orders.control.reset_of(place[0])
        return Progress(offset, reset=reset.id if reset else "", left=True)

    async def move(self, begun: Mapping[Place, int], reset: str) -> dict[Place, int]:
        """Continue partitions at other offsets, because of a reset or a recreated topic."""
        for place in begun:
            window = self._partitions.get(place)
            # Offsets of a recreated topic say nothing about the old one.
            if self._noted is not None and window is not None and window.reset != reset:
                self._noted.moving(NotedPlace(*place), window.progress(), reset)
        await self._note(begun, begins=True)
        for place, offset in begun.items():
            self._partitions.close([place])
            self._open(place, Progress(offset, reset=reset, left=True)).changes += 1
        await self._settling.settle()
        return dict(begun)

    async def revoke(self, places: Sequence[Place]) -> None:
        """Give up partitions: wait for their handlers, commit the progress, and close their windows."""
        windows = [window for place, window in self._partitions.items() if place in set(places)]
        for window in windows:
            window.stop()
        self._handling.give_back(windows)
        unfinished = await self._handling.finished(min(self._plan.lease, REVOKE_SECONDS), windows)
        if unfinished:
            log.warning(
                "%d messages of partitions that another instance gets are still being handled, and are handled there "
                "again: %s", len(unfinished), ", ".join(unfinished[:NAMED_IN_LOG]),
            )  # fmt: skip
        await self._settling.settle()
        self._partitions.close(places)

    async def lose(self, places: Sequence[Place]) -> None:
        """Close partitions that another instance owns already: nothing can be committed for them."""
        if places:
            log.warning("%d partitions were lost: messages that were not committed are handled again", len(places))
        self._handling.give_back([window for place, window in self._partitions.items() if place in set(places)])
        self._partitions.close(places)

    async def renew(self) -> None:
        """Commit and note the group's progress again, even if it has not changed.

        Kafka forgets an offset that was not committed for a week, if the group has no members: when it rests, or always
        if it has an owner.
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
        """Note for audits what this group consumes from partitions; without a note, an audit cannot judge them."""
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
