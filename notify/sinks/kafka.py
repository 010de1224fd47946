"""Apache Kafka as the queue, for those who outgrow one machine: bridges and relays publish, exactly once.

Each batch is a Kafka transaction that holds the messages and the source's position (in a compacted topic). Kafka fences
an older bridge of the same source by its transactional id; consumers read committed records only. Blocking calls of the
client run in one thread of their own. https://kafka.apache.org/documentation/#semantics
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, NotifyError, Unavailable
from notify.kafka_records import (
    DELAYED,
    DUE,
    POSITIONS,
    TARGET,
    Headers,
    brokers_of,
    due_us,
    header,
    headers_of,
    listed,
)
from notify.storage.bridged import stale_epoch
from notify.wire import Bridged, PackedBridgeBatch

log = logging.getLogger("notify.kafka")

CALL_SECONDS = 20.0
TRANSACTION_SECONDS = 60.0
IDLE_SECONDS = 0.5
LOG_LEVEL = 2
"""The client prints to stderr what it also raises; only what is critical, then."""
RELEASE_AT_ONCE = 1000
T = TypeVar("T")


class KafkaSink:
    """Publishes what bridges and relays read. One instance serves one source."""

    def __init__(self, url: str) -> None:
        self._brokers = brokers_of(url)
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
        make_topics(self._brokers, [POSITIONS, DELAYED], compacted=True)
        if not take_back and 0 < self._epoch < self._known(source)[0]:
            raise stale_epoch(f"another bridge publishes what source {source!r} has; stop one of the two")
        self._producer = Producer(
            {
                "bootstrap.servers": self._brokers,
                "log_level": LOG_LEVEL,
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
        self._place(source, self._epoch, position)
        self._producer.commit_transaction(CALL_SECONDS)
        return self._epoch, position

    def _known(self, source: str) -> tuple[int, str]:
        """The epoch that was claimed last, and the position; 0 and "" before the first."""
        found = latest(self._brokers, POSITIONS, source.encode())
        known: dict[str, Any] = json.loads(found) if found else {"epoch": 0, "position": ""}
        return known["epoch"], known["position"]

    def _place(self, source: str, epoch: int, position: str) -> None:
        self._produce(POSITIONS, source.encode(), json.dumps({"epoch": epoch, "position": position}).encode(), [])

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        """Publish a batch and its position in one transaction. Part of a large one stays open until the last part."""
        return await self._call(lambda: self._append(source, batch))

    def _append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        producer = self._producer
        assert producer is not None, "claim first"
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
                if due:
                    headers += [(DUE, str(due).encode()), (TARGET, m.topic.encode())]
                    if key is not None:
                        headers.append(("notify-key", key))
                    self._produce(DELAYED, f"{t.id}.{number}".encode(), m.body or b"", headers)
                else:
                    self._produce(m.topic, key, m.body or b"", headers)
        if batch.prepare:
            return Bridged(batch.position, batch.epoch, stored=len(batch.transactions))
        self._place(source, batch.epoch, batch.position)
        producer.flush(CALL_SECONDS)
        if self._failed:
            failed = self._failed[0]
            producer.abort_transaction(CALL_SECONDS)
            self._open = False
            raise KafkaException(failed)
        producer.commit_transaction(CALL_SECONDS)
        self._open = False
        return Bridged(batch.position, batch.epoch, stored=len(batch.transactions))

    def _produce(self, topic: str, key: bytes | None, value: bytes, headers: Headers) -> None:
        producer = self._producer
        assert producer is not None
        while True:
            try:
                producer.produce(topic, value, key, headers=headers, on_delivery=self._delivered)
                return
            except BufferError:
                producer.poll(0.1)

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
            raise _translated(found.args[0]) from raised

    async def close(self) -> None:
        self._producer = None
        self._pool.shutdown(wait=False)


def _translated(error: Any) -> NotifyError:
    if isinstance(error, KafkaError):
        if error.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
            return stale_epoch("another bridge of this source publishes now; stop one of the two")
        return Unavailable(f"Kafka: {error.str()}")
    return Unavailable(f"Kafka: {error}")


def make_topics(brokers: str, names: list[str], *, compacted: bool = False) -> None:
    """Make topics that are missing, with the brokers' default partitions (compacted ones: one).

    Raises Unavailable where the brokers do not answer, InvalidRequest where they refuse.
    """
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": LOG_LEVEL})
    try:
        known = admin.list_topics(timeout=CALL_SECONDS).topics
    except KafkaException as raised:
        raise Unavailable(f"Kafka at {brokers} does not answer: {raised.args[0].str()}") from raised
    config = {"cleanup.policy": "compact"} if compacted else {}
    partitions = 1 if compacted else -1
    wanted = [NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config) for name in names]
    missing = [topic for topic in wanted if topic.topic not in known]
    made = admin.create_topics(missing) if missing else {}
    for name, done in made.items():
        try:
            done.result(CALL_SECONDS)
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise InvalidRequest(f"Kafka refuses to make topic {name!r}: {raised.args[0].str()}") from raised


def latest(brokers: str, topic: str, key: bytes) -> bytes | None:
    """The last committed value of a key in a compacted topic of one partition; None where there is none."""
    found: bytes | None = None
    for message in _read_through(brokers, topic):
        if message.key() == key:
            found = message.value()
    return found


def _read_through(brokers: str, topic: str) -> list[Message]:
    """Every committed record of partition 0 up to where it ended when this was called."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "log_level": LOG_LEVEL,
            "group.id": "notify-positions",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    found: list[Message] = []
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + CALL_SECONDS
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                return found
            elif not error.retriable():
                raise KafkaException(error)
        raise Unavailable(f"Kafka does not give topic {topic!r} within {CALL_SECONDS:g} s")
    finally:
        consumer.close()


class DelayRelease:
    """Holds delayed messages and releases each when it is due: to its topic, with a tombstone where it waited.

    Any number may run, in every bridge and relay: the one that Kafka gives the topic's partition works, the others
    stand by. What waits is held in memory, and read again by whoever takes over.
    """

    def __init__(self, url: str) -> None:
        self._brokers = brokers_of(url)
        self.waiting: list[tuple[int, bytes]] = []
        self._records: dict[bytes, tuple[bytes, Headers]] = {}
        self.released = 0
        self.stopped = False

    def run(self) -> None:
        """Until `stop`, in the caller's thread. Raises Unavailable or Conflict."""
        try:
            self._run()
        except KafkaException as raised:
            raise _translated(raised.args[0]) from raised

    def stop(self) -> None:
        self.stopped = True

    def _run(self) -> None:
        make_topics(self._brokers, [DELAYED], compacted=True)
        producer = Producer(
            {
                "bootstrap.servers": self._brokers,
                "log_level": LOG_LEVEL,
                "transactional.id": "notify-delays",
                "compression.type": "lz4",
            }
        )
        consumer = Consumer(
            {
                "bootstrap.servers": self._brokers,
                "log_level": LOG_LEVEL,
                "group.id": "notify-delays",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "session.timeout.ms": 10_000,
            }
        )

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
