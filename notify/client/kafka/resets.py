"""Resets: moves partitions of this instance to other offsets: once for each reset by an operator, and when their topic
was recreated."""

from __future__ import annotations

import asyncio
import logging

from confluent_kafka import TopicPartition

from notify.client.kafka.assignment import Assignment
from notify.client.kafka.control import Orders
from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.starting import Starts
from notify.kafka.topic_ids import TopicIds

log = logging.getLogger("notify.consumer")


class Resets:
    """Carries out resets. Belongs to the event loop."""

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
                    log.warning("topic %s was made anew: this group begins anew there", topic)

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
            log.warning("topic %s of this group goes on from %s, by reset %s", reset.topic, reset.to, reset.id)

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
