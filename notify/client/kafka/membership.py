"""Kafka's group shares the partitions among its instances: a cooperative member, and what each rebalance does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition

from notify.backoff import Backoff
from notify.client.kafka.assignment import Assignment
from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Place
from notify.client.kafka.refusals import OTHERS_NOW, error_of, is_final
from notify.client.kafka.settling import commit_offsets
from notify.client.kafka.starting import Starts
from notify.kafka.progress import Progress

log = logging.getLogger("notify.consumer")
T = TypeVar("T")

RETRY_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0
OPEN_SECONDS = 120.0
"""Kafka may take so long to say where the group is in new partitions; then the consumer ends with the error."""


class Membership:
    """Kafka calls back in the feed's thread, within a poll; what the callbacks change belongs to the loop."""

    def __init__(self, feed: Feed, starts: Starts, assignment: Assignment, is_stopping: Callable[[], bool]) -> None:
        """`is_stopping`: whether the consumer ends, and does not wait any more to learn where the group is."""
        self._is_stopping = is_stopping
        self._feed = feed
        self._starts = starts
        self._assignment = assignment
        self._topics: list[str] = []
        self._waiting: set[Place] = set()
        """Partitions that are this member's, and in which the group cannot begin before they have a leader."""

    async def subscribe(self, topics: Mapping[str, int]) -> None:
        """Take part in these topics from now on, and begin in partitions that have a leader by now."""
        if list(topics) != self._topics:
            self._topics = list(topics)
            await self._feed.call(self._subscribe, self._topics)
        if self._waiting:
            await self._feed.call(self._open_waiting)

    async def begin(self, topics: Mapping[str, int]) -> None:
        """Commit where a group that has no members begins, in all partitions at once, before the first member has any.

        Where it has members, they have done so; partitions that are new to them begin as they are assigned.
        """
        await self._feed.call_patiently(
            self._begin, [(topic, n) for topic, count in topics.items() for n in range(count)]
        )

    def _begin(self, places: list[Place]) -> None:
        new = [place for place, progress in self._starts.committed(places).items() if progress is None]
        if not new:
            return
        offsets = self._starts.begin(new)
        try:
            begun = [
                TopicPartition(*place, offset, self._assignment.beginning(place, offset).metadata())
                for place, offset in offsets.items()
            ]
            commit_offsets(self._feed.consumer, begun)
        except KafkaException as raised:
            if error_of(raised).code() not in OTHERS_NOW:
                raise

    def _subscribe(self, topics: list[str]) -> None:
        self._feed.consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._was_lost)

    def _assigned(self, consumer: Consumer, given: list[TopicPartition]) -> None:
        self._feed.member = consumer.consumer_group_metadata()
        if not given:
            return
        places = _places(given)
        known, begun = self._until_known(places)
        self._waiting.update(place for place in places if place not in known)
        self._open(known, begun)

    def _open_waiting(self) -> None:
        known, begun = self._starts.positions(self._waiting)
        if known:
            self._waiting.difference_update(known)
            self._open(known, begun)

    def _open(self, known: Mapping[Place, Progress | None], begun: Mapping[Place, int]) -> None:
        offsets = self._feed.thread.wait_for(self._assignment.open(known, begun))
        fetched = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        self._feed.consumer.incremental_assign(fetched)
        self._feed.consumer.resume(fetched)  # a partition that was paused when it left

    def _until_known(self, places: list[Place]) -> tuple[dict[Place, Progress | None], dict[Place, int]]:
        backoff, deadline = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS), time.monotonic() + OPEN_SECONDS
        while True:
            try:
                return self._starts.positions(places)
            except KafkaException as raised:
                if is_final(error_of(raised)) or self._is_stopping() or time.monotonic() > deadline:
                    raise
                log.warning("Kafka does not say where the group is, again soon: %s", error_of(raised).str())
                time.sleep(backoff.next())

    def _revoked(self, consumer: Consumer, taken: list[TopicPartition]) -> None:
        self._feed.member = consumer.consumer_group_metadata()
        self._feed.thread.wait_for(self._assignment.revoke(_places(taken)))
        consumer.incremental_unassign(self._assigned_of(taken))

    def _was_lost(self, consumer: Consumer, taken: list[TopicPartition]) -> None:
        self._feed.thread.wait_for(self._assignment.lose(_places(taken)))
        consumer.incremental_unassign(self._assigned_of(taken))

    def _assigned_of(self, taken: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Those that the client was told to fetch: it gives back no others."""
        assigned = [p for p in taken if (p.topic, p.partition) not in self._waiting]
        self._waiting.difference_update(_places(taken))
        return assigned


def _places(partitions: Sequence[TopicPartition]) -> list[Place]:
    return [(p.topic, p.partition) for p in partitions]
