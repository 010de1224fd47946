"""A consumer's loop over Apache Kafka: the same handlers and inbox as with a queue server.

What a handler refuses goes to a retry topic (one for each wait) or to the dead-letter topic, in one Kafka transaction
with the offsets: both or neither. Per key messages are handled one after the other, in the order of their partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from notify.client.handlers import reason_of
from notify.errors import DeadLetter, InvalidRequest, NotifyError, Unavailable
from notify.kafka import records
from notify.kafka.cluster import Cluster
from notify.kafka.records import Headers
from notify.kafka.subscriptions import Place, Subscribed, Subscriptions
from notify.message import ReceivedMessage

log = logging.getLogger("notify.consumer")

POLL_SECONDS = 0.5
CALL_SECONDS = 20.0
SESSION_SECONDS = 6
SERVED_MODES = ("shared", "ordered", "broadcast")


class KafkaLoop:
    """Receives for one consumer group until it is told to stop."""

    def __init__(
        self,
        url: str,
        group: str,
        instance: str,
        handlers: Sequence[Any],
        handle: Callable[[Any, ReceivedMessage], Awaitable[None]],
        batch: int,
    ) -> None:
        """`handle` runs a handler for a message and raises what it raises. Raises InvalidRequest for what Kafka's
        consumers cannot do: modes exclusive and failover, filters, patterns."""
        for h in handlers:
            if h.mode not in SERVED_MODES:
                raise InvalidRequest(f"mode {h.mode!r} is not served over Kafka; {', '.join(SERVED_MODES)} are")
            if h.filter or "*" in h.topic:
                raise InvalidRequest("filters and patterns are not served over Kafka: subscribe by name, use tags")
        if len({h.mode == "broadcast" for h in handlers}) > 1:
            raise InvalidRequest("over Kafka a consumer's topics are all broadcast or none: make two consumers")
        self._cluster = Cluster.of(url)
        self._handlers = {h.topic: h for h in handlers}
        self._handle = handle
        self._batch = batch
        broadcast = any(h.mode == "broadcast" for h in handlers)
        self._group = group
        self._kafka_group = f"{group}@{instance}" if broadcast else group
        starts = {h.start for h in handlers}
        if starts - {None, "latest", "earliest"} or len(starts - {None}) > 1:
            raise InvalidRequest("over Kafka a new group starts at latest or earliest, for all of its topics")
        self._start = "earliest" if "earliest" in starts else "latest"
        self._instance = instance
        self._subscriptions = None if broadcast else Subscriptions(self._cluster, group)
        self._retries = {records.retry_topic(group, s): s for s in records.RETRY_SECONDS}

    async def run(self, stopping: asyncio.Event) -> None:
        """Raises Unavailable where the brokers cannot be reached at first, InvalidRequest where they refuse."""
        await asyncio.to_thread(self._make_topics)
        consumer = self._cluster.consumer(
            {
                "group.id": self._kafka_group,
                "auto.offset.reset": self._start,
                "partition.assignment.strategy": "cooperative-sticky",
                "metadata.max.age.ms": 10_000,
                # Killed, it holds its partitions for so long; Kafka's default of 45 s is for slow machines.
                "session.timeout.ms": SESSION_SECONDS * 1000,
                "heartbeat.interval.ms": SESSION_SECONDS * 1000 // 3,
            }
        )
        producer = self._cluster.producer(
            {
                "transactional.id": f"notify-{self._kafka_group}-{self._instance}",
                "transaction.timeout.ms": round(CALL_SECONDS * 1000),
            }
        )
        await asyncio.to_thread(producer.init_transactions, CALL_SECONDS)
        consumer.subscribe([*self._handlers, *self._retries], on_assign=self._note)
        paused: dict[tuple[str, int], float] = {}
        try:
            while not stopping.is_set():
                self._resume(consumer, paused)
                found = await asyncio.to_thread(consumer.consume, self._batch, POLL_SECONDS)
                good = self._due(consumer, [m for m in found if self._is_message(m)], paused)
                if good:
                    await self._work(consumer, producer, good)
        except KafkaException as raised:
            raise Unavailable(f"Kafka: {raised.args[0]}") from raised
        finally:
            await asyncio.to_thread(consumer.close)

    def _make_topics(self) -> None:
        admin = self._cluster.admin()
        try:
            known = admin.list_topics(timeout=CALL_SECONDS).topics
        except KafkaException as raised:
            raise Unavailable(f"Kafka at {self._cluster.brokers} does not answer: {raised.args[0]}") from raised
        wanted = [*self._handlers, *self._retries, records.dead_letter_topic(self._group)]
        missing = [NewTopic(name, num_partitions=-1, replication_factor=-1) for name in wanted if name not in known]
        for name, done in (admin.create_topics(missing) if missing else {}).items():
            try:
                done.result(CALL_SECONDS)
            except KafkaException as raised:
                if raised.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise InvalidRequest(f"Kafka refuses to make topic {name!r}: {raised.args[0]}") from raised

    def _note(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        """Note what this group takes from partitions that it was given, for audits: they judge nothing without it."""
        own = [p for p in partitions if p.topic in self._handlers]
        if self._subscriptions is None or not own:
            return
        begins: dict[Place, Subscribed] = {}
        goes_on: dict[Place, Subscribed] = {}
        try:
            for p in consumer.committed(own, CALL_SECONDS):
                handler, start = self._handlers[p.topic], p.offset
                if start < 0:
                    low, high = consumer.get_watermark_offsets(p, CALL_SECONDS)
                    start = low if self._start == "earliest" else high
                noted = begins if p.offset < 0 else goes_on
                noted[Place(p.topic, p.partition)] = Subscribed(handler.mode, start, tuple(handler.tags))
            self._subscriptions.note(begins, begins=True)
            self._subscriptions.note(goes_on, begins=False)
        except (KafkaException, NotifyError) as error:
            log.warning("the subscriptions could not be noted for audits: %s", error)

    def _is_message(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.fatal() or not (error.retriable() or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART):
            raise KafkaException(error)
        log.debug("Kafka: %s", error)
        return False

    # --- waiting for retries ----------------------------------------------------------------------------------

    def _due(self, consumer: Any, found: list[Any], paused: dict[tuple[str, int], float]) -> list[Any]:
        """The messages that may be handled now. The others of a retry topic's partition wait: they are due later."""
        now_us = time.time_ns() // 1000
        good = []
        for m in found:
            place = (m.topic(), m.partition())
            if place in paused:
                continue
            due = records.header(records.listed(m), records.DUE) if m.topic() in self._retries else None
            if due is not None and int(due) > now_us:
                paused[place] = int(due) / 1e6
                consumer.pause([TopicPartition(*place)])
                consumer.seek(TopicPartition(*place, m.offset()))
            else:
                good.append(m)
        return good

    def _resume(self, consumer: Any, paused: dict[tuple[str, int], float]) -> None:
        for place in [place for place, at in paused.items() if at <= time.time()]:
            del paused[place]
            with contextlib.suppress(KafkaException):  # the partition may be another's by now
                consumer.resume([TopicPartition(*place)])

    # --- handling ---------------------------------------------------------------------------------------------

    async def _work(self, consumer: Any, producer: Any, found: list[Any]) -> None:
        """Handle a batch; then the offsets, with what failed on its way to where it goes, in one transaction."""
        by_key: dict[Any, list[Any]] = {}
        for number, m in enumerate(found):
            by_key.setdefault((m.topic(), m.key()) if m.key() is not None else number, []).append(m)
        failed: list[tuple[str, Any, Headers]] = []
        await asyncio.gather(*(self._one_after_the_other(messages, failed) for messages in by_key.values()))
        offsets: dict[tuple[str, int], int] = {}
        for m in found:
            place = (m.topic(), m.partition())
            offsets[place] = max(offsets.get(place, 0), m.offset() + 1)
        behind = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
        if failed:
            firsts: dict[tuple[str, int], int] = {}
            for m in found:
                firsts.setdefault((m.topic(), m.partition()), m.offset())
            await asyncio.to_thread(self._move, consumer, producer, failed, behind, firsts)
        else:
            try:
                await asyncio.to_thread(partial(consumer.commit, offsets=behind, asynchronous=False))
            except KafkaException as raised:
                # The partitions may be another's by now: what was handled comes there again.
                log.warning("the offsets were not taken: %s", raised.args[0])

    async def _one_after_the_other(self, messages: list[Any], failed: list[tuple[str, Any, Headers]]) -> None:
        for m in messages:
            headers = records.listed(m)
            topic = records.header(headers, records.TARGET) or m.topic()
            attempt = int(records.header(headers, records.ATTEMPT) or 1)
            handler = self._handlers.get(topic)
            if handler is None or not self._is_wanted(handler, headers):
                continue
            message = ReceivedMessage(
                records.header(headers, records.ID) or f"{m.topic()}/{m.partition()}@{m.offset()}",
                topic,
                m.partition(),
                m.offset(),
                m.value() or b"",
                m.key().decode() if m.key() is not None else None,
                records.header(headers, records.TAG),
                records.own_headers(headers),
                attempt,
                datetime.fromtimestamp(m.timestamp()[1] / 1000, UTC).isoformat().replace("+00:00", "Z"),
            )
            try:
                await self._handle(handler, message)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                log.warning("handler of %s failed on %s (attempt %d)", topic, message.id, attempt, exc_info=True)
                failed.append(self._destination(handler, topic, m, headers, attempt, error))

    def _is_wanted(self, handler: Any, headers: Headers) -> bool:
        expires = records.header(headers, records.EXPIRES)
        if expires is not None and int(expires) <= time.time_ns() // 1000:
            return False
        return not handler.tags or records.header(headers, records.TAG) in handler.tags

    def _destination(
        self, handler: Any, topic: str, m: Any, headers: Headers, attempt: int, error: BaseException
    ) -> tuple[str, Any, Headers]:
        """Where what failed goes, and with which headers."""
        kept = [h for h in headers if h[0] not in (records.ATTEMPT, records.DUE, records.TARGET, records.REASON)]
        reason = reason_of(error).encode()
        kept += [(records.TARGET, topic.encode()), (records.REASON, reason)]
        if isinstance(error, DeadLetter) or attempt >= handler.max_attempts:
            return records.dead_letter_topic(self._group), m, [*kept, (records.ATTEMPT, str(attempt).encode())]
        backoff = min(handler.retry_min * 2 ** (attempt - 1), handler.retry_max)
        seconds = next((s for s in records.RETRY_SECONDS if s >= backoff), records.RETRY_SECONDS[-1])
        due = time.time_ns() // 1000 + seconds * 1_000_000
        kept += [(records.ATTEMPT, str(attempt + 1).encode()), (records.DUE, str(due).encode())]
        return records.retry_topic(self._group, seconds), m, kept

    def _move(
        self,
        consumer: Any,
        producer: Any,
        failed: list[tuple[str, Any, Headers]],
        offsets: list[Any],
        firsts: dict[tuple[str, int], int],
    ) -> None:
        """Retries, dead letters and offsets, all or none. Where it fails, the batch comes again."""
        producer.begin_transaction()
        try:
            for topic, m, headers in failed:
                producer.produce(topic, m.value(), m.key(), headers=headers)
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), CALL_SECONDS)
            producer.commit_transaction(CALL_SECONDS)
        except KafkaException as raised:
            if raised.args[0].fatal():
                raise
            log.warning("moving what failed was refused, the batch comes again: %s", raised.args[0])
            producer.abort_transaction(CALL_SECONDS)
            for (topic, partition), first in firsts.items():
                with contextlib.suppress(KafkaException):  # the partition may be another's by now
                    consumer.seek(TopicPartition(topic, partition, first))
