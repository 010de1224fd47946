"""Membership: this instance as a member of Kafka's group, which divides the partitions among its members."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from notify.client.kafka.assignment import Assignment
from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Place
from notify.client.kafka.refusals import OTHERS_NOW, error_of, is_final
from notify.client.kafka.settling import commit_offsets
from notify.client.kafka.starting import Starts
from notify.kafka.progress import Progress
from notify.runtime.backoff import Backoff
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

RETRY_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0
OPEN_SECONDS = 120.0
"""How long Kafka may take to give the group's progress in new partitions; then the consumer ends with the error."""


class Membership:
    """Takes part in Kafka's group. Kafka calls back in the feed's thread, within a poll; the callbacks run their
    changes on the loop."""

    def __init__(self, feed: Feed, starts: Starts, assignment: Assignment, is_stopping: Callable[[], bool]) -> None:
        """`is_stopping`: whether the consumer stops, so that it does not wait for the group's progress any more."""
        self._is_stopping = is_stopping
        self._feed = feed
        self._starts = starts
        self._assignment = assignment
        self._topics: list[str] = []
        self._waiting: set[Place] = set()
        """Partitions of this member that have no leader, so that the group cannot begin there yet."""

    async def subscribe(self, topics: Mapping[str, int]) -> None:
        """Subscribe to these topics, and begin in waiting partitions that have got a leader."""
        if list(topics) != self._topics:
            self._topics = list(topics)
            await self._feed.call(self._subscribe, self._topics)
        if self._waiting:
            await self._feed.call(self._open_waiting)

    async def begin(self, topics: Mapping[str, int]) -> None:
        """Commit where a group without members begins, in all partitions at once, before a member gets one.

        If the group has members, they have done this; partitions that are new to it begin when they are assigned.
        """
        await self._feed.call_patiently(
            self._begin, [(topic, n) for topic, count in topics.items() for n in range(count)]
        )

    def _begin(self, places: list[Place]) -> None:
        uncommitted = [place for place, progress in self._starts.committed(places).items() if progress is None]
        if not uncommitted:
            return
        offsets = self._starts.begin(uncommitted)
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

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._feed.member = consumer.consumer_group_metadata()
        if not partitions:
            return
        places = _places(partitions)
        known, begun = self._until_known(places)
        self._waiting.update(place for place in places if place not in known)
        self._feed.fetch(self._assignment.open(known, begun))

    def _open_waiting(self) -> None:
        known, begun = self._starts.positions(self._waiting)
        if known:
            self._waiting.difference_update(known)
            self._feed.fetch(self._assignment.open(known, begun))

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

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._feed.member = consumer.consumer_group_metadata()
        self._feed.thread.wait_for(self._assignment.revoke(_places(partitions)))
        consumer.incremental_unassign(self._assigned_of(partitions))

    def _was_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._feed.thread.wait_for(self._assignment.lose(_places(partitions)))
        consumer.incremental_unassign(self._assigned_of(partitions))

    def _assigned_of(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """The partitions that the client fetches: it cannot unassign those that wait for a leader."""
        assigned = [p for p in partitions if (p.topic, p.partition) not in self._waiting]
        self._waiting.difference_update(_places(partitions))
        return assigned


def _places(partitions: Sequence[TopicPartition]) -> list[Place]:
    return [(p.topic, p.partition) for p in partitions]
