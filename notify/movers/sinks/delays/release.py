"""One member of the consumer group that releases delayed messages: it reads slots, and moves records that may move.

Records and offsets are written in one Kafka transaction with the group's generation: a member that was frozen while
another member took over its partitions is refused (KIP-447). Only one batch is in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from notify.errors import Unavailable
from notify.kafka.brokers import CALL_SECONDS
from notify.kafka.calls import leave
from notify.kafka.cluster import Cluster
from notify.kafka.codes import NEVER_STORED
from notify.kafka.records import REASON
from notify.kafka.rights import user_of
from notify.kafka.table import PARTITION
from notify.kafka.transactional import TransactionalProducer, flush
from notify.kafka.undelivered import TOPIC as REFUSED
from notify.movers.sinks.delays.delayed_record import Delayed, delayed_headers, delayed_of
from notify.movers.sinks.delays.slots import Slots
from notify.movers.sinks.delays.wheels import Place, Wheels
from notify.runtime.backoff import Backoff

log = logging.getLogger("notify.delays")

GROUP = "notify-delay-wheels"
IDLE_SECONDS = 0.5
SESSION_SECONDS = 6
"""How long a killed or frozen releaser keeps its partitions."""
STEP_SECONDS = 30
"""A releaser whose step takes longer loses its partitions. By default a hanging client keeps them for five minutes,
because it still sends heartbeats."""
TRANSACTION_SECONDS = 10
"""After this time the brokers abort the transaction of a killed releaser; readers of its topics wait until then."""
PROPAGATION_SECONDS = 3
BATCH_RECORDS = 1000
BATCH_BYTES = 4 << 20
READ_AHEAD_KB = 8 << 10
FETCH_MS = 200
AGAIN_US = 60_000_000
"""The wait before a message is tried again if this user has no right to its topic."""
TRIES = 10
"""The number of refusals in a row before this membership ends."""
AGAIN_SECONDS, AGAIN_MAX_SECONDS = 0.02, 0.5
"""The pause between such tries: during a rebalance the group refuses the earlier generation for a moment."""
CLEAN_SECONDS = 30.0
"""How often the brokers are asked to delete records that have moved: the wheels' topics keep records of any age."""
TOPIC_LOOK_SECONDS = 1.0
RETRIED = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN))
"""Temporary errors of reading: the brokers are unreachable, or do not know a new topic yet."""


@dataclass(slots=True)
class Released:
    """Counts: messages released to their topics, moves to another wheel, and messages that topics refused
    permanently."""

    released: int = 0
    moved: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Move:
    """A record, and where it moves: to a slot, or (`to` None) to its topic."""

    place: Place
    offset: int
    delayed: Delayed
    to: Place | None


class Release:
    """A consumer, a producer, and the batch between them; for use in one thread."""

    def __init__(
        self,
        cluster: Cluster,
        wheels: Wheels,
        now_us: Callable[[], int],
        total: Released,
        transactional_id: str,
        group: str,
    ) -> None:
        """`transactional_id`: that of this releaser alone. `group`: that of all releasers of these wheels.

        Raises KafkaException.
        """
        self._wheels = wheels
        self._now_us = now_us
        self._total = total
        self._metadata: Any = None
        self._batch: list[_Move] = []
        self._user = user_of(cluster)
        self._refused: dict[tuple[Place, int], KafkaError] = {}
        """The errors of records that their topics refused; such a record is written elsewhere at the next try."""
        self._is_refused = False
        self._failures = 0
        self._backoff = Backoff(AGAIN_SECONDS, AGAIN_MAX_SECONDS)
        self._most = BATCH_RECORDS
        """The size of the next batch, in records. Halved if a topic refuses some of them without saying which."""
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._group = group
        self._producer = self._made_producer()
        self._consumer = cluster.consumer(
            {
                "group.id": group,
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": SESSION_SECONDS * 1000,
                "heartbeat.interval.ms": SESSION_SECONDS * 1000 // 3,
                "max.poll.interval.ms": STEP_SECONDS * 1000,
                # A resumed partition is read only with the next fetch, after the fetch that now waits for records.
                "fetch.wait.max.ms": FETCH_MS,
                "queued.max.messages.kbytes": READ_AHEAD_KB,
                "topic.metadata.refresh.interval.ms": 10_000,
            }
        )
        self._slots = Slots(self._consumer)
        topics, admin = [wheel.topic for wheel in wheels.wheels], cluster.admin()
        self._cleaning = Cleaning(admin)
        self._recreated = Recreated(admin, topics)
        self._consumer.subscribe(
            topics,
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._revoked,
        )

    def step(self) -> None:
        """Wait a moment for records, and move a batch of them. Raises KafkaException, Unavailable."""
        self._gather()
        if topic := self._recreated.look():
            # The brokers deleted the group's offsets with the earlier topic: another membership begins at its start.
            raise Unavailable(f"topic {topic} was deleted and recreated; reading it from the start")
        if self._batch and self._move():
            self._failures = 0
            self._backoff.reset()
            self._most = min(2 * self._most, BATCH_RECORDS)
        self._cleaning.clean()

    def close(self) -> bool:
        """Leave the group, and close the clients; False if one of them hangs, which is then abandoned."""
        clients = [self._producer, self._cleaning, self._recreated]
        del self._producer, self._cleaning, self._recreated
        return leave(self._group, partial(_end, self._consumer, clients))

    # --- reading ----------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Read here, not when a batch is written: it must not be newer than the last assignment that this client knows.
        self._metadata = consumer.consumer_group_metadata()
        consumer.incremental_assign(partitions)
        if partitions:
            # A partition that was lost while it waited, such as by a frozen client, is still paused when it returns.
            consumer.resume(partitions)

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        places = {Place(p.topic, p.partition) for p in partitions}
        self._batch = [move for move in self._batch if move.place not in places]
        self._refused = {key: reason for key, reason in self._refused.items() if key[0] not in places}
        self._slots.forget(places)

    def _gather(self) -> None:
        """Read the next batch: records that may move, from partitions that do not wait."""
        self._batch = []
        now_us = self._now_us()
        size = sum([self._take(record) for record in self._slots.wake(now_us)])
        timeout = 0.0 if self._batch else IDLE_SECONDS
        if (next_us := self._slots.next_us()) is not None:
            timeout = min(timeout, max(0.001, (next_us - now_us) / 1e6))
        while len(self._batch) < self._most and size < BATCH_BYTES:
            message = self._consumer.poll(timeout)
            if message is None:
                return
            timeout = 0
            if (error := message.error()) is not None:
                if error.code() in RETRIED or error.retriable():
                    return
                raise KafkaException(error)
            size += self._take(message)

    def _take(self, message: Any) -> int:
        """Add a record to the batch, or pause its partition; the record's size if it was added, else 0."""
        place = Place(message.topic(), message.partition())
        if self._slots.waits(place):
            return 0
        delayed = delayed_of(message)
        if delayed is None:
            log.error(
                "record %d of partition %d of %s is not a delayed message: left out", message.offset(), *place[::-1]
            )
            return 0
        now_us = self._now_us()
        moves_us = self._wheels.moves_us(place.topic, delayed.due_us)
        to = self._wheels.place(delayed.due_us, now_us)
        if to == place or (to is not None and to.topic == place.topic and self._is_finest(place)):
            self._slots.wait(place, message, delayed.size, moves_us)
            return 0
        self._batch.append(_Move(place, message.offset(), delayed, to))
        return delayed.size

    def _made_producer(self) -> TransactionalProducer:
        """A producer, which fences earlier producers of this releaser. Raises KafkaException."""
        producer = self._cluster.transactional_producer(
            {
                "transactional.id": self._transactional_id,
                "transaction.timeout.ms": TRANSACTION_SECONDS * 1000,
                "compression.type": "lz4",
                # How long a new topic may be unknown; by default 30 s, which is longer than a transaction.
                "topic.metadata.propagation.max.ms": PROPAGATION_SECONDS * 1000,
            }
        )
        producer.init_transactions(CALL_SECONDS)
        return producer

    def _is_finest(self, place: Place) -> bool:
        return place.topic == self._wheels.wheels[0].topic

    # --- writing ----------------------------------------------------------------------------------------------

    def _move(self) -> bool:
        """Write the batch and its offsets in one transaction; False if the batch will be read again."""
        if self._producer.is_spent:
            self._producer = self._made_producer()
        self._is_refused = False
        offsets = {move.place: move.offset + 1 for move in self._batch}
        try:
            self._producer.begin_transaction()
            for move in self._batch:
                self._produce(move)
            flush(self._producer, lambda: self._is_refused, CALL_SECONDS)
            to_commit = [TopicPartition(*place, offset) for place, offset in offsets.items()]
            self._producer.send_offsets_to_transaction(to_commit, self._metadata, CALL_SECONDS)
            self._producer.commit_transaction(CALL_SECONDS)
        except KafkaException as raised:
            self._take_back(raised.args[0])
            return False
        for move in self._batch:
            refused = self._refused.pop((move.place, move.offset), None)
            if refused is not None and refused.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                self._total.refused += 1
            elif refused is not None:
                self._total.moved += 1
            elif move.to is None:
                self._total.released += 1
            else:
                self._total.moved += 1
        self._cleaning.moved(offsets)
        return True

    def _produce(self, move: _Move) -> None:
        delayed = move.delayed
        refused = self._refused.get((move.place, move.offset))
        topic, partition, headers = delayed.topic, -1, delayed.headers
        if refused is not None and refused.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            now_us = self._now_us()
            place = self._wheels.place(now_us + AGAIN_US, now_us)
            assert place is not None, "it is not due yet"
            (topic, partition), headers = place, delayed_headers(headers, now_us + AGAIN_US, topic)
        elif refused is not None:
            headers = [*delayed_headers(headers, delayed.due_us, topic), (REASON, refused.str().encode())]
            topic, partition = REFUSED, PARTITION
        elif move.to is not None:
            headers = delayed_headers(headers, delayed.due_us, topic)
            topic, partition = move.to
        answered = partial(self._answered, move)
        try:
            self._producer.produce(topic, delayed.value, delayed.key, partition, headers=headers, on_delivery=answered)
        except KafkaException as raised:
            self._answered(move, raised.args[0], None)
            raise

    def _answered(self, move: _Move, error: KafkaError | None, _: Any) -> None:
        if error is None or error.code() not in NEVER_STORED:
            return
        self._is_refused = True
        key = (move.place, move.offset)
        if len(self._batch) == 1 and key not in self._refused:
            topic = move.delayed.topic
            self._refused[key] = error
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                log.warning(
                    "a delayed message for topic %r is refused, again in %g s: grant %s Write on the topic (%s)",
                    topic, AGAIN_US / 1e6, self._user, error.str(),
                )  # fmt: skip
            else:
                log.error("a delayed message for topic %r is refused, and goes to %s: %s", topic, REFUSED, error.str())

    def _take_back(self, error: KafkaError) -> None:
        """Abort the transaction after a failure, and read the batch again. Raises if the client cannot abort it."""
        if error.fatal() or not (error.txn_requires_abort() or error.code() in NEVER_STORED):
            raise KafkaException(error)
        if self._is_refused and len(self._batch) > 1:
            self._most = max(1, len(self._batch) // 2)
        else:
            self._failures += 1
        if self._failures > TRIES:
            raise Unavailable(f"Kafka refuses to release delayed messages, {TRIES} times in a row: {error.str()}")
        log.info("a batch of delayed messages was refused and is read again: %s", error)
        self._producer.abort_transaction(CALL_SECONDS)
        firsts: dict[Place, int] = {}
        for move in self._batch:
            firsts.setdefault(move.place, move.offset)
        self._slots.rewind(firsts)
        if self._failures:
            time.sleep(self._backoff.next())  # a pause, bounded


def _end(consumer: Consumer, clients: list[object]) -> None:
    try:
        consumer.close()
    finally:
        clients.clear()  # in this thread, because closing these clients may take as long


class Cleaning:
    """Makes the brokers delete records before the committed offsets, now and then."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._offsets: dict[Place, int] = {}
        self._requests: Mapping[Any, Any] = {}
        self._cleaned_at = time.monotonic()

    def moved(self, offsets: Mapping[Place, int]) -> None:
        """Record that the records before these offsets have moved."""
        self._offsets.update(offsets)

    def clean(self) -> None:
        """Send a request every CLEAN_SECONDS; log if the brokers refused the last request."""
        if time.monotonic() - self._cleaned_at < CLEAN_SECONDS or not self._offsets:
            return
        self._cleaned_at = time.monotonic()
        self._report()
        self._requests = self._admin.delete_records([TopicPartition(*place, n) for place, n in self._offsets.items()])
        self._offsets.clear()

    def _report(self) -> None:
        refused = []
        for request in self._requests.values():
            if request.done():
                try:
                    request.result()
                except KafkaException as raised:
                    refused.append(raised.args[0])
        if refused:
            log.warning("Kafka did not delete delayed messages that have moved on: %s", refused[0].str())


class Recreated:
    """The ids of the wheels' topics since a membership began: a topic that is made again gets another id."""

    def __init__(self, admin: AdminClient, topics: Collection[str]) -> None:
        self._admin = admin
        self._topics = TopicCollection(sorted(topics))
        self._ids: dict[str, str] = {}
        self._asked: Mapping[str, Any] = {}
        self._asked_at = float("-inf")

    def look(self) -> str:
        """The name of a topic that was deleted and made again; empty if none is known.

        Does not wait: it asks every TOPIC_LOOK_SECONDS, and a later call reads the answers. A topic that is missing,
        and one whose broker does not answer, keeps its id.
        """
        if all(answer.done() for answer in self._asked.values()):
            for name, answer in self._asked.items():
                try:
                    topic_id = str(answer.result().topic_id)
                except KafkaException:
                    continue
                if self._ids.setdefault(name, topic_id) != topic_id:
                    return name
            self._asked = {}
            if time.monotonic() - self._asked_at >= TOPIC_LOOK_SECONDS:
                self._asked_at = time.monotonic()
                self._asked = self._admin.describe_topics(self._topics)
        return ""
