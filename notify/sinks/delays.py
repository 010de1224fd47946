"""Delayed messages in Kafka: they wait in a topic of their own, and are released when they are due."""

from __future__ import annotations

import heapq
import time

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition

from notify.kafka.brokers import CALL_SECONDS, make_topics, translated
from notify.kafka.cluster import Cluster
from notify.kafka.records import DELAYED, DUE, TARGET, Headers, header, listed

IDLE_SECONDS = 0.5
RELEASE_AT_ONCE = 1000


class DelayRelease:
    """Holds delayed messages and releases each when it is due: to its topic, with a tombstone where it waited.

    Any number may run, in every bridge and relay: the one that Kafka gives the topic's partition works, the others
    stand by. What waits is held in memory, and read again by whoever takes over.
    """

    def __init__(self, url: str) -> None:
        self._cluster = Cluster.of(url)
        self.waiting: list[tuple[int, bytes]] = []
        self._records: dict[bytes, tuple[bytes, Headers]] = {}
        self.released = 0
        self.stopped = False

    def run(self) -> None:
        """Until `stop`, in the caller's thread. Raises Unavailable or Conflict."""
        try:
            self._run()
        except KafkaException as raised:
            raise translated(raised.args[0]) from raised

    def stop(self) -> None:
        self.stopped = True

    def _run(self) -> None:
        make_topics(self._cluster, [DELAYED], compacted=True)
        producer = self._cluster.producer(
            {
                "transactional.id": "notify-delays",
                "compression.type": "lz4",
            }
        )
        consumer = self._cluster.consumer({"group.id": "notify-delays", "session.timeout.ms": 10_000})

        def assigned(mine: Consumer, partitions: list[TopicPartition]) -> None:
            # Whoever had the partition before is fenced; what waits is read from the beginning.
            self._forget()
            if partitions:
                producer.init_transactions(CALL_SECONDS)
            for partition in partitions:
                partition.offset = OFFSET_BEGINNING
            mine.assign(partitions)

        consumer.subscribe([DELAYED], on_assign=assigned, on_revoke=lambda *_: self._forget())
        try:
            while not self.stopped:
                for message in consumer.consume(RELEASE_AT_ONCE, timeout=self._pause()):
                    if message.error() is None:
                        self._take(message)
                self._release(producer)
        finally:
            consumer.close()

    def _forget(self) -> None:
        self.waiting.clear()
        self._records.clear()

    def _pause(self) -> float:
        if not self.waiting:
            return IDLE_SECONDS
        return min(IDLE_SECONDS, max(0.001, self.waiting[0][0] / 1e6 - time.time()))

    def _take(self, message: Message) -> None:
        key, value = message.key() or b"", message.value()
        headers = listed(message)
        if value is None and not headers:
            self._records.pop(key, None)  # released before
            return
        due = header(headers, DUE)
        if due is not None and key not in self._records:
            self._records[key] = (value or b"", headers)
            heapq.heappush(self.waiting, (int(due), key))

    def _release(self, producer: Producer) -> None:
        now_us = time.time_ns() // 1000
        due: list[bytes] = []
        while self.waiting and self.waiting[0][0] <= now_us and len(due) < RELEASE_AT_ONCE:
            _, key = heapq.heappop(self.waiting)
            if key in self._records:
                due.append(key)
        if not due:
            return
        producer.begin_transaction()
        for key in due:
            value, headers = self._records[key]
            target = header(headers, TARGET)
            record_key = header(headers, "notify-key")
            plain = [h for h in headers if h[0] not in (DUE, TARGET, "notify-key")]
            assert target is not None
            producer.produce(target, value, record_key.encode() if record_key is not None else None, headers=plain)
            producer.produce(DELAYED, None, key)
        producer.flush(CALL_SECONDS)
        producer.commit_transaction(CALL_SECONDS)
        for key in due:
            self._records.pop(key, None)
        self.released += len(due)
