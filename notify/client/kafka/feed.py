"""Kafka's client of one consumer, in a thread of its own: records come out, calls go in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from notify.backoff import Backoff
from notify.client.kafka.client_thread import ClientThread
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.refusals import error_of, is_final, refusal
from notify.client.kafka.window import Item, Window
from notify.errors import Unavailable
from notify.kafka import records
from notify.kafka.brokers import known_topics
from notify.kafka.cluster import Cluster
from notify.kafka.groups import RETRY
from notify.kafka.hindrance import refuses
from notify.kafka.leaving import leave

log = logging.getLogger("notify.consumer")
T = TypeVar("T")

ANSWER_SECONDS = 10.0
"""How long the brokers may take to answer at the start."""
RETRY_SECONDS, RETRY_MAX_SECONDS, PATIENCE_SECONDS = 0.1, 2.0, 30.0
SESSION_SECONDS = 6
"""Killed, a consumer holds its partitions for so long; Kafka's default of 45 s is for slow machines."""
LEAVE_SECONDS = 60.0
"""The last commit takes 20 s at most, and brokers may stand still."""
POLL_INTERVAL_SECONDS = 300
"""A consumer whose process is frozen for longer loses its partitions, even where its heartbeats went on."""
QUEUED_KILOBYTES = 16 << 10
"""Records that the client has fetched and nobody has taken, of all partitions together."""
FETCHED_BYTES = 8 << 20
"""The most that a broker answers at once; it answers with one record, however large."""
_SIZES = {
    "queued.max.messages.kbytes": str(QUEUED_KILOBYTES), "fetch.max.bytes": str(FETCHED_BYTES),
    "queued.min.messages": "10000", "fetch.queue.backoff.ms": "20",
}  # fmt: skip
"""Bounds of memory, which the operators' settings may change. Where one is reached, the client fetches nothing for the
last of them: its default of 1 s would be the consumer's rate, about 12,000 small records a second."""
POLLED_BYTES = 4 << 20
"""One poll takes records of so much memory at most, and one record more."""
CLIENT_RECOVERS = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
        KafkaError._MAX_POLL_EXCEEDED, KafkaError._PARTITION_EOF, KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE,
    )
)  # fmt: skip
"""Errors that the client gets over by itself, sooner or later."""


class Feed:
    """`consumer` is called in `thread` alone. Made on the event loop that it belongs to."""

    def __init__(self, cluster: Cluster, group: str, instance: str, partitions: Partitions) -> None:
        """`group` is Kafka's. Raises InvalidRequest for settings that Kafka's client refuses."""
        self._cluster = cluster
        self._group = group
        self._partitions = partitions
        self._fault: KafkaError | None = None
        self.member: Any = None
        """Who this client is in the group since its last rebalance. Kafka refuses the transactions of a member that it
        has put out; a client that was told so is nobody, whom it does not refuse."""
        self.consumer: Consumer = cluster.consumer(
            {name: value for name, value in _SIZES.items() if name not in cluster.settings}
            | {
                "group.id": group,
                "client.id": instance,
                # Offsets are always given. Where retention has deleted what they stand for, the next there is comes.
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "cooperative-sticky",
                "metadata.max.age.ms": 10_000,
                "session.timeout.ms": SESSION_SECONDS * 1000,
                "heartbeat.interval.ms": SESSION_SECONDS * 1000 // 3,
                "max.poll.interval.ms": POLL_INTERVAL_SECONDS * 1000,
                "enable.partition.eof": True,
                "error_cb": self._note_fault,
            }
        )
        self.thread = ClientThread("notify-kafka")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the client's thread. KafkaException is raised as ours, see refusals.py."""
        try:
            return await self.thread.call(function, *arguments)
        except KafkaException as raised:
            raise refusal(self._fault or error_of(raised), self._cluster, self._group) from raised

    async def call_patiently(self, function: Callable[..., T], *arguments: Any) -> T:
        """As `call`, again while it fails for now: the leader of a topic that was just made is not known yet, say."""
        backoff, deadline = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS), time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await self.call(function, *arguments)
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                log.debug("Kafka is asked again: %s", error)
            await asyncio.sleep(backoff.next())

    def look(self) -> None:
        """Ask the brokers for their topics, for the first time.

        Raises Unauthorized where they refuse login or certificate, Unavailable where they do not answer.
        """
        known_topics(self._cluster, ANSWER_SECONDS)
        self._fault = None

    async def poll(self, most: int, seconds: float) -> int:
        """Put records that come into the windows; how many. Rebalances happen within this call."""
        came, ends = await self.call(self._poll, most, seconds)
        anew: dict[Window, Window] = {}
        for polled, item in came:
            window = anew.get(polled, polled)
            if item.offset < window.next and not window.is_closed:
                anew[polled] = window = self._partitions.begin_anew(window, item.offset)
            self._partitions.add(window, item)
        for polled, offset in ends:
            self._partitions.reach(anew.get(polled, polled), offset)
        return len(came)

    def _poll(self, most: int, seconds: float) -> tuple[list[tuple[Window, Item]], list[tuple[Window, int]]]:
        """Records, and the ends of partitions that were read through."""
        came: list[tuple[Window, Item]] = []
        ends: list[tuple[Window, int]] = []
        room = POLLED_BYTES
        # One by one: the client's call for many at once ends the process where a rebalance comes up within it.
        record = self.consumer.poll(seconds)
        while record is not None:
            error = record.error()
            place = _place(record)
            # Asked in this thread: a window that opens later, after a rebalance, begins with another fetch.
            window = self._partitions.get(place)
            if error is None and window is not None:
                item = _item(place[0], record)
                came.append((window, item))
                room -= item.size
            elif error is not None and error.code() == KafkaError._PARTITION_EOF and window is not None:
                ends.append((window, record.offset() or 0))
            elif error is not None:
                self._take_error(error)
            if len(came) >= most or room <= 0:
                break
            record = self.consumer.poll(0)
        return came, ends

    def _take_error(self, error: KafkaError) -> None:
        if is_final(error) or not (error.retriable() or error.code() in CLIENT_RECOVERS):
            raise KafkaException(error)
        log.debug("Kafka: %s", error.str())

    def _note_fault(self, error: KafkaError) -> None:
        if refuses(error):
            self._fault = error
        log.debug("Kafka: %s", error.str())

    async def pause(self, places: Iterable[Place]) -> None:
        """Fetch nothing of these partitions, if they are to be paused still when it is this call's turn.

        One that went on elsewhere meanwhile, by a reset, is fetched, and nobody would resume it.
        """

        def pause(partitions: list[TopicPartition]) -> None:
            still = [p for p in partitions if (p.topic, p.partition) in self._partitions.paused]
            if still:
                self.consumer.pause(still)

        await self._change(pause, places)

    async def resume(self, places: Iterable[Place]) -> None:
        await self._change(self.consumer.resume, places)

    async def _change(self, function: Callable[[list[TopicPartition]], None], places: Iterable[Place]) -> None:
        def change(wanted: list[Place]) -> None:
            for place in wanted:
                try:
                    function([TopicPartition(*place)])
                except KafkaException as raised:  # another's by now
                    log.debug("Kafka: %s", error_of(raised).str())

        await self.call(change, list(places))

    async def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Leave the group, after the call that is under way. Waits at most so long for both."""
        await self.thread.end(partial(leave, self._group, self.consumer.close, LEAVE_SECONDS), seconds)


def _place(record: Any) -> Place:
    return record.topic(), record.partition()


def _item(topic: str, record: Any) -> Item:
    offset, size = record.offset(), len(record) + len(record.key() or b"") + 200
    if not topic.startswith(RETRY):
        return Item(offset, record.key(), size, record)
    headers = records.listed(record)
    attempt, due_us = records.number(headers, records.ATTEMPT) or 1, records.number(headers, records.DUE) or 0
    return Item(offset, record.key(), size, record, attempt, due_us)
