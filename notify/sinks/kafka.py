"""Apache Kafka as the queue, for those who outgrow one machine: bridges and relays publish, exactly once.

Each batch is a Kafka transaction that holds the messages and the source's position (in a compacted topic). Kafka fences
an older bridge of the same source by its transactional id; consumers read committed records only. Blocking calls of the
client run in one thread of their own. https://kafka.apache.org/documentation/#semantics
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from notify.errors import InvalidRequest, Unavailable, stale_epoch
from notify.kafka.brokers import CALL_SECONDS, latest, make_topics, translated
from notify.kafka.cluster import Cluster
from notify.kafka.records import POSITIONS, Headers, due_us, headers_of
from notify.sinks.delays.delayed import delayed_headers
from notify.sinks.delays.topics import make_wheels
from notify.sinks.delays.wheels import WHEELS
from notify.wire import Bridged, PackedBridgeBatch

TRANSACTION_SECONDS = 60.0
BY_KEY = -1
"""The partition that the client's partitioner chooses."""
T = TypeVar("T")


class KafkaSink:
    """Publishes what bridges and relays read. One instance serves one source."""

    def __init__(self, url: str) -> None:
        self._cluster = Cluster.of(url)
        self._pool = ThreadPoolExecutor(1, "notify-kafka")
        self._producer: Producer | None = None
        self._open = False
        self._failed: list[KafkaError] = []
        self._epoch = 0

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        """Fence every earlier publisher of the source; the position behind what was committed last.

        Without `take_back`, raises Conflict (`stale_epoch`) where another has claimed it since this sink did.
        """
        return await self._call(lambda: self._claim(source, take_back))

    def _claim(self, source: str, take_back: bool) -> tuple[int, str]:
        make_topics(self._cluster, [POSITIONS], compacted=True)
        make_wheels(self._cluster, WHEELS)
        if not take_back and 0 < self._epoch < self._known(source)[0]:
            raise stale_epoch(f"another bridge publishes what source {source!r} has; stop one of the two")
        self._producer = self._cluster.producer(
            {
                "transactional.id": f"notify-bridge-{source}",
                "transaction.timeout.ms": round(TRANSACTION_SECONDS * 1000),
                "linger.ms": 5,
                "compression.type": "lz4",
                "batch.size": 1 << 20,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 256 << 10,
            }
        )
        self._open = False
        self._producer.init_transactions(CALL_SECONDS)
        epoch, position = self._known(source)
        self._epoch = epoch + 1
        # Written at once: whoever was fenced learns from it that it was no failure of the brokers.
        self._producer.begin_transaction()
        self._place(source, self._epoch, position, position)
        self._producer.commit_transaction(CALL_SECONDS)
        return self._epoch, position

    def _known(self, source: str) -> tuple[int, str]:
        """The epoch that was claimed last, and the position; 0 and "" before the first."""
        found = latest(self._cluster, POSITIONS, source.encode())
        known: dict[str, Any] = json.loads(found) if found else {"epoch": 0, "position": ""}
        return known["epoch"], known["position"]

    def _place(self, source: str, epoch: int, position: str, since: str) -> None:
        """`since`: the position that the batch goes on from; an audit compares it with the one before."""
        value = json.dumps({"epoch": epoch, "position": position, "since": since}).encode()
        self._produce(POSITIONS, source.encode(), value, [])

    async def position(self, source: str) -> str:
        return await self._call(lambda: self._known(source)[1])

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        """Publish a batch and its position in one transaction. Part of a large one stays open until the last part."""
        return await self._call(lambda: self._append(source, batch))

    def _append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        producer = self._claimed()
        if batch.rollback and self._open:  # nothing but the parts that are rolled back is in it
            if batch.commit:
                raise InvalidRequest(
                    "a large transaction was rolled back to a savepoint after a part of it had been published; Kafka "
                    "cannot take back that part alone: start with --backfill, which takes the rest from the table"
                )
            producer.abort_transaction(CALL_SECONDS)
            self._open = False
        if not self._open:
            producer.begin_transaction()
            self._open = True
            self._failed.clear()
        now_us = time.time_ns() // 1000
        for t in batch.transactions:
            for number, m in enumerate(t.messages):
                due = due_us(m, now_us)
                headers = headers_of(t, number, m, now_us)
                key = m.key.encode() if m.key is not None else None
                if waits := WHEELS.place(due, now_us):
                    headers = delayed_headers(headers, due, m.topic)
                    self._produce(waits.topic, key, m.body or b"", headers, waits.partition)
                else:
                    self._produce(m.topic, key, m.body or b"", headers)
        if batch.prepare:
            return Bridged(batch.position, batch.epoch, stored=len(batch.transactions))
        self._place(source, batch.epoch, batch.position, batch.expected_position)
        producer.flush(CALL_SECONDS)
        if self._failed:
            failed = self._failed[0]
            producer.abort_transaction(CALL_SECONDS)
            self._open = False
            raise KafkaException(failed)
        producer.commit_transaction(CALL_SECONDS)
        self._open = False
        return Bridged(batch.position, batch.epoch, stored=len(batch.transactions))

    def _produce(self, topic: str, key: bytes | None, value: bytes, headers: Headers, partition: int = BY_KEY) -> None:
        producer = self._claimed()
        while True:
            try:
                producer.produce(topic, value, key, partition, headers=headers, on_delivery=self._delivered)
                return
            except BufferError:
                producer.poll(0.1)

    def _claimed(self) -> Producer:
        """The client that has claimed a source. Raises Unavailable where none has, or where it failed since."""
        if self._producer is None:
            raise Unavailable("the source is not claimed: claim it first")
        return self._producer

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._failed.append(error)

    async def _call(self, function: Callable[[], T]) -> T:
        """In the sink's thread. Raises Conflict where this publisher is fenced, Unavailable for the rest."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except (KafkaException, SystemError) as raised:
            # A fatal error that comes up within a callback reaches Python as the cause of a SystemError.
            found = raised if isinstance(raised, KafkaException) else raised.__cause__
            self._producer = None
            if not isinstance(found, KafkaException):
                raise Unavailable(f"Kafka's client failed: {raised}") from raised
            raise translated(found.args[0]) from raised

    async def close(self) -> None:
        self._producer = None
        self._pool.shutdown(wait=False)
