"""Assignment: opens the windows of new partitions at the group's progress, and closes them after a last commit; and
Resets, which move partitions to other offsets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from confluent_kafka import TopicPartition

from notify.client.kafka.control import Orders
from notify.client.kafka.feed import Feed
from notify.client.kafka.handling import NAMED_IN_LOG, Handling
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.settling import Settling
from notify.client.kafka.starting import Starts
from notify.client.kafka.window import Window
from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import NotifyError
from notify.kafka.groups import OWN_TOPICS, retry_topic
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place as NotedPlace
from notify.kafka.subscriptions import Subscribed, Subscriptions
from notify.kafka.topic_ids import TopicIds
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

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
        beginning = {place: self.beginning(place, offset) for place, offset in begun.items()}
        await self._note({place: progress for place, progress in known.items() if progress is not None})
        await self._note(beginning, begins=True)
        for place, progress in known.items():
            if progress is None:
                progress = beginning[place]
            window = self._open(place, progress)
            # Commit that the partition is in use, in case this process dies, and that the offset is Notify's by now.
            window.changes += progress.left or not progress.is_own
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
        beginning = {place: Progress(offset, reset=reset, left=True) for place, offset in begun.items()}
        await self._note(beginning, begins=True)
        for place, progress in beginning.items():
            self._partitions.close([place])
            self._open(place, progress).changes += 1
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
        present = {place: Progress(w.position, reset=w.reset) for place, w in self._partitions.items()}
        await self._note(present, renews=True)

    def _open(self, place: Place, progress: Progress) -> Window:
        handler = self._plan.handler_of(place[0])
        progress = replace(progress, topic=self._ids.of(place[0]))
        return self._partitions.open(place, progress, in_order=handler is not None and handler.mode == "ordered")

    def places(self) -> list[Place]:
        return [place for place, _ in self._partitions.items()]

    def has(self, place: Place) -> bool:
        return self._partitions.get(place) is not None

    async def _note(self, known: Mapping[Place, Progress], *, begins: bool = False, renews: bool = False) -> None:
        """Note for audits what this group consumes from partitions; without a note, an audit cannot judge them."""
        subscribed = {}
        inbox_from_us = time.time_ns() // 1000 if self._plan.has_inbox else -1
        for place, progress in known.items():
            handler, topic_id = self._plan.handler_of(place[0]), self._ids.of(place[0])
            if handler is not None and not place[0].startswith(OWN_TOPICS):
                subscribed[NotedPlace(*place)] = Subscribed(
                    handler.mode, progress.offset, handler.tags, handler.filter, inbox_from_us=inbox_from_us,
                    topic_id=topic_id, reset=progress.reset,
                )  # fmt: skip
            elif place[0] == retry_topic(self._plan.group) and not progress.is_own:
                subscribed[NotedPlace(*place)] = Subscribed("shared", progress.offset, topic_id=topic_id)
        if self._noted is None or not subscribed:
            return
        try:
            note = partial(self._noted.note, subscribed, begins=begins, renews=renews)
            await asyncio.get_running_loop().run_in_executor(self._threads, note)
        except NotifyError as error:
            log.warning("the subscriptions could not be noted for audits: %s", error)


class Resets:
    """Moves partitions to other offsets: once for each reset by an operator, and when their topic was recreated.
    Belongs to the event loop."""

    def __init__(
        self,
        feed: Feed,
        starts: Starts,
        assignment: Assignment,
        partitions: Partitions,
        orders: Orders,
        ids: TopicIds,
    ) -> None:
        self._feed = feed
        self._starts = starts
        self._assignment = assignment
        self._partitions = partitions
        self._orders = orders
        self._ids = ids
        self._carrying = asyncio.Lock()
        """Held while resets are carried out, because both orders and rebalances ask for this."""

    async def carry_out(self) -> None:
        """Move the partitions that have not carried out their topic's last reset."""
        async with self._carrying:
            await self._carry_out()

    async def begin_anew(self) -> None:
        """Move partitions whose topic was recreated to its first record. Raises Unavailable."""
        async with self._carrying:
            await self._feed.call(self._ids.look, {topic for (topic, _), _ in self._partitions.items()})
            moved: dict[str, list[Place]] = {}
            for place, window in self._partitions.items():
                topic_id = self._ids.of(place[0])
                if window.topic_id and topic_id != window.topic_id:
                    moved.setdefault(window.reset, []).append(place)
                else:
                    window.topic_id = topic_id
            for reset, places in moved.items():
                offsets = await self._feed.call_patiently(self._starts.offsets, dict.fromkeys(places, "earliest"))
                await self._feed.call(self._move, offsets, reset)
                for topic in sorted({topic for topic, _ in places}):
                    log.warning("topic %s was deleted and recreated; this group starts over there", topic)

    async def _carry_out(self) -> None:
        for reset in self._orders.control.resets:
            places = [
                place
                for place, window in self._partitions.items()
                if place[0] == reset.topic and window.reset != reset.id
            ]
            if not places:
                continue
            offsets = await self._feed.call_patiently(self._starts.offsets, dict.fromkeys(places, reset.start()))
            await self._feed.call(self._move, offsets, reset.id)
            log.warning("topic %s of this group continues from %s, by reset %s", reset.topic, reset.to, reset.id)

    def _move(self, offsets: dict[Place, int], reset: str) -> None:
        """Move partitions, in the feed's thread and between two polls, so that the next fetch is from a new offset."""
        assigned = {place: offset for place, offset in offsets.items() if self._partitions.get(place) is not None}
        if not assigned:
            return
        moved = [TopicPartition(*place, offset) for place, offset in assigned.items()]
        consumer = self._feed.consumer
        consumer.incremental_unassign(moved)
        self._feed.thread.wait_for(self._assignment.move(assigned, reset))
        consumer.incremental_assign(moved)
        consumer.resume(moved)
