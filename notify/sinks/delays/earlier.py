"""Delayed messages of earlier versions: they wait in one compacted topic, each with a tombstone once it was released.

What waits there moves into the wheels, each message in one transaction with its tombstone, so that it moves once
whatever happens in between. The transactional id is the one that earlier versions released with: they are fenced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from notify.errors import Unavailable
from notify.kafka.brokers import CALL_SECONDS, known_topics
from notify.kafka.cluster import Cluster
from notify.kafka.records import DELAYED, DUE, TARGET, Headers, header, listed
from notify.sinks.delays.delayed import delayed_headers
from notify.sinks.delays.wheels import Wheels

EARLIER_ID = "notify-delays"
"""The transactional id of earlier versions."""
GROUP = "notify-delays-earlier"
"""The group whose offset says up to where everything has moved."""
EARLIER_KEY = "notify-key"
END_SECONDS = 90.0
"""A transaction that is open in the topic ends by then: the publisher's time-out is 60 s."""
BATCH = 500
BATCH_BYTES = 4 << 20


def move_earlier(cluster: Cluster, wheels: Wheels, now_us: Callable[[], int], topic: str = DELAYED) -> int:
    """Move what waits in the topic of earlier versions; how many messages. Raises KafkaException, Unavailable."""
    if topic not in known_topics(cluster):
        return 0
    consumer = cluster.consumer({"group.id": GROUP, "enable.partition.eof": True, "auto.offset.reset": "earliest"})
    try:
        start = max(0, consumer.committed([TopicPartition(topic, 0)], CALL_SECONDS)[0].offset)
        end = consumer.get_watermark_offsets(TopicPartition(topic, 0), CALL_SECONDS)[1]
        if start >= end:
            return 0
        producer = cluster.producer({"transactional.id": EARLIER_ID, "compression.type": "lz4"})
        producer.init_transactions(CALL_SECONDS)
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
        moving.commit(end)
        return len(waiting)
    finally:
        consumer.close()


class _Moving:
    """The transactions in which messages move."""

    def __init__(self, producer: Producer, consumer: Consumer, topic: str) -> None:
        self._producer = producer
        self._consumer = consumer
        self._topic = topic
        self._count = self._size = 0
        producer.begin_transaction()

    def move(self, message: Any, wheels: Wheels, now_us: int) -> None:
        """Put a message into its slot, and a tombstone where it waited."""
        headers = listed(message)
        due, target, key = (header(headers, name) for name in (DUE, TARGET, EARLIER_KEY))
        if due is None or target is None:
            return
        plain: Headers = [each for each in headers if each[0] not in (DUE, TARGET, EARLIER_KEY)]
        # One that is due waits for a moment more: a release can put aside what its topic refuses.
        place = wheels.place(max(int(due), now_us + 1), now_us)
        assert place is not None
        value = message.value() or b""
        record_key = key.encode() if key is not None else None
        waiting = delayed_headers(plain, int(due), target)
        self._producer.produce(place.topic, value, record_key, place.partition, headers=waiting)
        self._producer.produce(self._topic, None, message.key())
        self._count += 1
        self._size += len(value)
        if self._count >= BATCH or self._size >= BATCH_BYTES:
            self._producer.commit_transaction(CALL_SECONDS)
            self._producer.begin_transaction()
            self._count = self._size = 0

    def commit(self, end: int) -> None:
        """Note that everything before an offset has moved."""
        offsets = [TopicPartition(self._topic, 0, end)]
        metadata = self._consumer.consumer_group_metadata()
        self._producer.send_offsets_to_transaction(offsets, metadata, CALL_SECONDS)
        self._producer.commit_transaction(CALL_SECONDS)


def _read(consumer: Any, topic: str, start: int, end: int) -> Iterator[Any]:
    """The committed records from an offset to another. Raises Unavailable where they do not come."""
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
    raise Unavailable(f"topic {topic!r} does not end: a transaction is open in it; stop what has an earlier version")
