"""Ownership: in the modes exclusive and failover, one instance owns all partitions of a group.

The owner is the instance to which Kafka assigns the partition of the owner topic. It commits in transactions with the
group's transactional id, so that Kafka fences a former owner that was frozen, which then receives nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition

from notify.client.kafka.assignment import Assignment
from notify.client.kafka.feed import SESSION_SECONDS, Feed
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import error_of, is_final, refusal
from notify.client.kafka.settling import Settling
from notify.client.kafka.starting import Starts
from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import Conflict, NotifyError
from notify.kafka.calls import leave
from notify.kafka.cluster import Cluster
from notify.kafka.groups import owner_topic
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")
T = TypeVar("T")

POLL_SECONDS = 0.5
CALL_SECONDS = 10.0
POLL_INTERVAL_SECONDS = 60.0
"""An owner that does not poll for this time, or for the lease if that is longer, loses the partition, even if its
heartbeats continue: its loop is blocked, or its client hangs while it leaves."""
PASSING_SECONDS = SESSION_SECONDS + 2.0
"""How long a killed owner keeps the partition: until its session ends."""


class Ownership:
    """Gains and gives up the ownership. Belongs to the event loop; its client has a separate thread."""

    def __init__(
        self, plan: Plan, cluster: Cluster, feed: Feed, starts: Starts, settling: Settling, assignment: Assignment
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._feed = feed
        self._starts = starts
        self._settling = settling
        self._assignment = assignment
        self._group = owner_topic(plan.group)
        self._pool = HandlerThreads(1, "notify-kafka-owner")
        self._consumer: Consumer = cluster.consumer(
            {
                "group.id": self._group,
                "client.id": plan.instance,
                # The owner stays the owner when another instance comes.
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": SESSION_SECONDS * 1000,
                "heartbeat.interval.ms": SESSION_SECONDS * 1000 // 3,
                "max.poll.interval.ms": round(max(POLL_INTERVAL_SECONDS, plan.lease) * 1000),
            }
        )
        self._topics: Mapping[str, int] = {}
        self._is_owner = False
        self._without_since: float | None = None
        """Since when another instance has the owner topic's partition; None if this instance has it, or before the
        first assignment."""
        self._changing = asyncio.Lock()
        """Held while partitions are opened or given up: opening a partition twice would forget its first window."""

    async def subscribe(self, topics: Mapping[str, int]) -> None:
        """Open these topics (with their numbers of partitions) as soon as this instance is the owner."""
        self._topics = topics
        await self._take_new()

    async def run(self) -> None:
        """Follow the ownership until cancelled. Raises Conflict (`topic_is_taken`) if an exclusive group has another
        owner."""
        await self._call(self._join)
        while True:
            has_partition = await self._call(self._poll)
            if self._is_owner:
                if not has_partition or self._settling.is_fenced:
                    await self._polling(self._give_up())
                continue
            if has_partition and await self._call(self._is_confirmed):
                await self._polling(self._gain())
            elif self._plan.is_exclusive and self._is_owned():
                raise Conflict(
                    f"group {self._plan.group!r} is exclusive, and instance {await self._call(self._noted_owner)} owns "
                    "its topics", "topic_is_taken",
                )  # fmt: skip

    async def _polling(self, change: Coroutine[Any, Any, None]) -> None:
        """Carry out a change, and poll meanwhile: a member that does not poll holds up the others' rebalance."""
        changing = asyncio.create_task(change)
        try:
            while not (await asyncio.wait([changing], timeout=POLL_SECONDS))[0]:
                await self._call(self._poll)
            changing.result()
        finally:
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)

    def _join(self) -> None:
        self._consumer.subscribe([self._group], on_assign=self._assigned)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        if partitions:
            self._without_since = None
        elif self._without_since is None:
            self._without_since = time.monotonic()

    def _poll(self) -> bool:
        """Whether this instance has the owner topic's partition."""
        record = self._consumer.poll(POLL_SECONDS)
        if record is not None and (error := record.error()) is not None and is_final(error):
            raise KafkaException(error)
        return bool(self._consumer.assignment())

    def _is_confirmed(self) -> bool:
        """Whether the brokers confirm that this instance has the partition: one that was frozen may wrongly believe so.

        They accept a commit only from a member of the current generation. The commit also records the owner's name.
        """
        try:
            committed = self._consumer.commit(
                offsets=[TopicPartition(self._group, 0, 0, self._plan.instance)], asynchronous=False
            )
            error = committed[0].error
        except KafkaException as raised:
            error = error_of(raised)
        if error is not None and is_final(error):
            raise KafkaException(error)
        if error is not None:
            log.debug("group %s is not this instance's, or not yet: %s", self._plan.group, error.str())
        return error is None

    def _is_owned(self) -> bool:
        """Whether another instance has the partition, and for longer than a killed instance keeps it."""
        since = self._without_since
        return since is not None and time.monotonic() - since > PASSING_SECONDS

    def _noted_owner(self) -> str:
        committed = self._consumer.committed([TopicPartition(self._group, 0)], timeout=CALL_SECONDS)[0]
        return committed.metadata or "another"

    async def _gain(self) -> None:
        """Become the owner: fence the former owner first, then continue at its last commit."""
        self._feed.member = await self._feed.call(self._feed.consumer.consumer_group_metadata)
        try:
            await self._settling.claim()
        except KafkaException as raised:
            if is_final(error_of(raised)):
                raise refusal(error_of(raised), self._cluster, self._plan.group) from raised
            log.warning("group %s cannot be claimed now, again soon: %s", self._plan.group, error_of(raised).str())
            return
        self._is_owner = True
        log.info("this instance owns the topics of group %s", self._plan.group)
        await self._take_new()

    async def _take_new(self) -> None:
        """If this instance is the owner, open the partitions that are not open yet."""
        async with self._changing:
            places = [(topic, n) for topic, count in self._topics.items() for n in range(count)]
            unopened = [place for place in places if not self._assignment.has(place)]
            if not unopened or not self._is_owner:
                return
            known, begun = await self._feed.call_patiently(self._starts.positions, unopened)
            await self._feed.call(lambda: self._feed.fetch(self._assignment.open(known, begun)))

    async def _give_up(self) -> None:
        self._is_owner = False
        log.warning("this instance no longer owns the topics of group %s", self._plan.group)
        async with self._changing:
            await self._assignment.lose(self._assignment.places())
            await self._feed.call(self._feed.consumer.unassign)

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except KafkaException as raised:
            raise refusal(error_of(raised), self._cluster, self._plan.group) from raised

    async def close(self) -> None:
        """Leave the owner's group, so that another instance can own the topics."""
        with contextlib.suppress(NotifyError):
            await self._call(partial(leave, self._group, self._consumer.close))

    def leave_to_itself(self) -> None:
        """Make no further calls and wait for none: another instance owns the topics once this one's session ends."""
        self._pool.shutdown()
