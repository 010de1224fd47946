"""Delayed messages of earlier versions, which wait in one compacted topic, with a tombstone for each released message.

This module moves waiting messages into the wheels. Each message moves in one transaction with its tombstone, so that it
moves exactly once. The transactional id is that of earlier versions, which are fenced by this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from notify.errors import Unavailable
from notify.kafka.brokers import CALL_SECONDS, known_topics
from notify.kafka.cluster import Cluster
from notify.kafka.records import DELAYED, DUE, TARGET, Headers, header, listed, number
from notify.kafka.transactional import TransactionalProducer
from notify.movers.sinks.delays.delayed_record import delayed_headers
from notify.movers.sinks.delays.wheels import Wheels

log = logging.getLogger("notify.delays")

EARLIER_ID = "notify-delays"
"""The transactional id of earlier versions."""
GROUP = "notify-delays-earlier"
"""The group whose committed offset marks the end of the moved messages."""
EARLIER_KEY = "notify-key"
END_SECONDS = 90.0
"""How long to wait for the end of the topic: an open transaction ends within the publisher's time-out of 60 s."""
OPEN_SECONDS = 5.0
PAUSE_SECONDS = 0.2
NO_COORDINATOR = frozenset(
    (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
)
BATCH = 500
BATCH_BYTES = 4 << 20


def move_earlier(cluster: Cluster, wheels: Wheels, now_us: Callable[[], int], topic: str = DELAYED) -> int:
    """Move the messages that wait in an earlier version's topic; their number. Raises KafkaException, Unavailable."""
    if topic not in known_topics(cluster):
        return 0
    consumer = cluster.consumer({"group.id": GROUP, "enable.partition.eof": True, "auto.offset.reset": "earliest"})
    try:
        start, end = _extent(consumer, topic)
        if start >= end:
            return 0
        producer = cluster.transactional_producer({"transactional.id": EARLIER_ID, "compression.type": "lz4"})
        producer.init_transactions(CALL_SECONDS)
        start, end = _extent(consumer, topic)  # the process that was just fenced may have moved some
        if start >= end:
            return 0
        waiting: dict[bytes, int] = {}
        for message in _read(consumer, topic, start, end):
            if message.value() is None and not listed(message):
                waiting.pop(message.key(), None)
            else:
                waiting[message.key()] = message.offset()
        moving = _Moving(producer, consumer, topic)
        for message in _read(consumer, topic, start, end):
            if waiting.get(message.key()) == message.offset():
                moving.move(message, wheels, now_us())
            moving.commit_what_is_old()
        moving.commit(end)
        return len(waiting)
    finally:
        consumer.close()


def _extent(consumer: Consumer, topic: str) -> tuple[int, int]:
    """The first offset at which a message may wait, and the end of the topic."""
    partition = TopicPartition(topic, 0)
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        try:
            start = max(0, consumer.committed([partition], CALL_SECONDS)[0].offset)
            return start, int(consumer.get_watermark_offsets(partition, CALL_SECONDS)[1])
        except KafkaException as raised:
            if raised.args[0].code() not in NO_COORDINATOR or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)  # until the cluster has made or moved its topic of committed offsets


class _Moving:
    """The transactions in which messages move."""

    def __init__(self, producer: TransactionalProducer, consumer: Consumer, topic: str) -> None:
        self._producer = producer
        self._consumer = consumer
        self._topic = topic
        self._count = self._size = 0
        self._began = time.monotonic()
        producer.begin_transaction()

    def move(self, message: Any, wheels: Wheels, now_us: int) -> None:
        """Put a message into its slot, and its tombstone into the old topic."""
        headers = listed(message)
        due, target, key = number(headers, DUE), header(headers, TARGET), header(headers, EARLIER_KEY)
        if due is None or target is None:
            log.error("record %d of %s is not a delayed message: left out", message.offset(), self._topic)
            return
        plain: Headers = [each for each in headers if each[0] not in (DUE, TARGET, EARLIER_KEY)]
        # A message that is due waits a moment longer, so that `Release` handles a refusal by its topic.
        place = wheels.place(max(due, now_us + 1), now_us)
        assert place is not None
        value = message.value() or b""
        record_key = key.encode() if key is not None else None
        waiting = delayed_headers(plain, due, target)
        if not self._count:
            self._began = time.monotonic()
        self._producer.produce(place.topic, value, record_key, place.partition, headers=waiting)
        self._producer.produce(self._topic, None, message.key())
        self._count += 1
        self._size += len(value)
        if self._count >= BATCH or self._size >= BATCH_BYTES:
            self._commit()

    def commit_what_is_old(self) -> None:
        """Commit a transaction that has been open for OPEN_SECONDS: Kafka ends it after a minute."""
        if self._count and time.monotonic() - self._began > OPEN_SECONDS:
            self._commit()

    def _commit(self) -> None:
        self._producer.commit_transaction(CALL_SECONDS)
        self._producer.begin_transaction()
        self._count = self._size = 0

    def commit(self, end: int) -> None:
        """Record that everything before an offset has moved."""
        offsets = [TopicPartition(self._topic, 0, end)]
        metadata = self._consumer.consumer_group_metadata()
        self._producer.send_offsets_to_transaction(offsets, metadata, CALL_SECONDS)
        self._producer.commit_transaction(CALL_SECONDS)


def _read(consumer: Any, topic: str, start: int, end: int) -> Iterator[Any]:
    """The committed records in [start, end). Raises Unavailable if they do not arrive."""
    consumer.assign([TopicPartition(topic, 0, start)])
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        error = message.error()
        if error is None and message.offset() < end:
            yield message
            deadline = time.monotonic() + END_SECONDS
        elif error is None or (error.code() == KafkaError._PARTITION_EOF and message.offset() >= end):
            return
        elif error.code() != KafkaError._PARTITION_EOF and not error.retriable():
            raise KafkaException(error)
    raise Unavailable(
        f"topic {topic!r} does not end: a transaction is open in it; stop all processes of an earlier version"
    )
