"""Apache Kafka as the queue, where one machine is not enough: bridges and relays publish exactly once.

Each batch is a Kafka transaction with the messages and the source's position. Kafka fences an older bridge of the same
source by its transactional id; consumers read committed records only. Blocking calls of the client run in a separate
thread. https://kafka.apache.org/documentation/#semantics
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message

from notify.errors import Conflict, Forbidden, InvalidRequest, NotifyError, Unauthorized, Unavailable, stale_epoch
from notify.kafka.brokers import CALL_SECONDS, translated
from notify.kafka.cluster import REFUSED_SETTINGS, Cluster
from notify.kafka.codes import TOO_LARGE
from notify.kafka.diagnosis import BROKER_SETTING
from notify.kafka.groups import OWN_TOPICS
from notify.kafka.positions import Recorded, make_positions_topic, newest_whole, opening, positions_topic, standing
from notify.kafka.quotas import QUOTAS
from notify.kafka.records import Headers, due_us, headers_of
from notify.kafka.refusals import REFUSED
from notify.kafka.rights import missing, of_bridge, user_of
from notify.kafka.table import PARTITION
from notify.kafka.topics import Topics, record_bytes
from notify.kafka.transactional import TransactionalProducer, flush
from notify.movers.sinks.acceptance import refusal, refused
from notify.movers.sinks.delays.delayed_record import delayed_headers
from notify.movers.sinks.delays.topics import make_wheels
from notify.movers.sinks.delays.wheels import LATE_US, WHEELS
from notify.protocol.limits import check_name
from notify.protocol.wire import Bridged, BridgedTransaction, Item, PackedBridgeBatch, RefusedReport
from notify.protocol.withdrawal import CANCELS, DEDUPE, KAFKA_REFUSES, REPLACES
from notify.runtime.clock import wall_clock

log = logging.getLogger("notify.binlog_bridge")

TRANSACTION_SECONDS = 60.0
THROTTLED_SECONDS = 45.0
"""How long a transaction may take while brokers do not read because of a quota; it also has to be committed in time."""
MOST_BYTES, LEAST_BYTES = 16 << 20, 64 << 10
"""The bounds of what a batch should have."""
QUICK_SECONDS = 5.0
"""If a transaction takes less, the next batch may be larger."""
BATCH_BYTES = 1 << 20
"""The most bytes of records that the client sends in one request."""
MOST_TOGETHER = 10_000
"""The most records that the client sends in one request; this is also its default."""
CLOSE_SECONDS = 5.0
OF_A_RECORD = TOO_LARGE | {KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION}
"""Permanent errors of a record. All records of a request may get the error of one of them."""
FOR_GOOD = OF_A_RECORD | {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION}
"""All permanent errors: of a record, or of a topic."""
_OF_OWN_QUEUES = frozenset((CANCELS, REPLACES, DEDUPE))
"""The headers of messages that withdraw or collapse others, which only the queues of a Notify server can do."""
BY_KEY = -1
"""The partition that the client's partitioner chooses."""
T = TypeVar("T")


class Record(NamedTuple):
    """A record with the arguments for the client, and the id of its transaction."""

    of_transaction: str
    topic: str
    key: bytes | None
    value: bytes
    headers: Headers
    partition: int = BY_KEY


class KafkaSink:
    """Publishes the transactions of bridges and relays. One instance serves one source."""

    def __init__(
        self,
        url: str,
        call_seconds: float = CALL_SECONDS,
        throttled_seconds: float = THROTTLED_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call_seconds`: how long the brokers may take for a call, such as a commit. `throttled_seconds`: how long
        they may take for a transaction while they do not read because of a quota."""
        self._call_seconds = call_seconds
        self._throttled_seconds = throttled_seconds
        self._monotonic = monotonic
        self.most_bytes = MOST_BYTES
        """See HasPace: less after brokers have not read a batch in time, because of a quota."""
        self._began = 0.0
        """When the last Kafka transaction began, by the monotonic clock."""
        self._bytes = 0
        """How many bytes of records it has."""
        self._closing = threading.Event()
        self._cluster = Cluster.of(url)
        self._topics = Topics(self._cluster)
        self._pool = ThreadPoolExecutor(1, "notify-kafka")
        self._producer: TransactionalProducer | None = None
        self._source = ""
        self._epoch = 0
        """The last epoch that this sink requested, whether or not it got an answer."""
        self._recorded = Recorded()
        """The last recorded position is after everything that is published."""
        self._is_open = False
        """Whether a Kafka transaction is open."""
        self._has_parts = False
        self._placed_us = 0
        """When the first slot was chosen for a delayed record of the open transaction; 0: it has no delayed record."""
        self._failed: dict[str, KafkaError] = {}
        """The errors of records that brokers refused, by transaction id."""
        self._withdrawn: NotifyError | None = None
        """The error for a withdrawn right: to a topic of Notify itself, or to a topic that accepted records before."""
        self._granted: set[str] = set()
        """Topics that have accepted records."""
        self._bad: dict[str, Item] = {}
        """Transactions that a broker refused permanently, and that the caller has not been told of yet."""
        self._batch_bytes = BATCH_BYTES
        self._is_to_send_alone = self._sends_alone = False
        """Whether the next client, and the present client, send each record in its own request."""

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        """Fence every earlier publisher of the source; the epoch, and the position after the last committed record.

        Without `take_back`, raises Conflict (`stale_epoch`) if another publisher has claimed the source since this sink
        did.
        """
        return await self._call(lambda: self._claim(source, take_back))

    def _claim(self, source: str, take_back: bool) -> tuple[int, str]:
        check_name("source", source)
        self._source = source
        self._cluster = self._cluster.again()
        self._topics = Topics(self._cluster)
        make_positions_topic(self._cluster, source)
        make_wheels(self._cluster, WHEELS, tells_changed=True)
        if not take_back:
            self._check_is_newest()
        producer = self._replaced()
        # No transaction of this source is open any more, so that the committed position is final.
        self._epoch = max(self._epoch, self._recorded.read(self._cluster, source)) + 1
        # Written immediately, so that a fenced publisher can tell that the brokers did not fail.
        producer.begin_transaction()
        self._is_open = True
        self._place(producer, self._epoch, self._recorded.position)
        self._commit(producer)
        return self._epoch, self._recorded.position

    def _replaced(self) -> TransactionalProducer:
        """A new client in place of the present one. It fences all earlier clients of the source, and what they sent."""
        self._end(self._call_seconds)
        self._producer = producer = self._cluster.transactional_producer(
            {
                "transactional.id": f"notify-bridge-{self._source}",
                "transaction.timeout.ms": round(TRANSACTION_SECONDS * 1000),
                "linger.ms": 5,
                "compression.type": "lz4",
                "batch.size": self._batch_bytes,
                "batch.num.messages": 1 if self._is_to_send_alone else MOST_TOGETHER,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 256 << 10,
                "delivery.report.only.error": True,
            }
        )
        self._sends_alone = self._is_to_send_alone
        producer.init_transactions(self._call_seconds)
        return producer

    def _check_is_newest(self) -> None:
        """Raises Conflict if another publisher has claimed the source since this sink did."""
        if 0 < self._epoch < standing(self._cluster, self._source).epoch:
            raise stale_epoch(f"another bridge publishes what source {self._source!r} has; stop one of the two")

    def _renewed(self) -> TransactionalProducer:
        """A new client after one that is spent, with the same claim of the source.

        Raises Conflict if another publisher has claimed the source; Unavailable if the recorded position is not there.
        """
        self._check_is_newest()  # before it fences that publisher, and after, because one may have come in between
        producer = self._replaced()
        try:
            self._check_is_newest()
            if not self._recorded.is_last(standing(self._cluster, self._source)):
                raise Unavailable("Kafka has another position of this source than was committed: claiming again")
        except NotifyError:
            self._end(CLOSE_SECONDS)
            raise
        return producer

    async def position(self, source: str) -> str:
        return await self._call(lambda: newest_whole(self._cluster, source))

    async def show_refused(self, source: str, report: RefusedReport) -> None:
        """Report to the servers that show Kafka's groups how many refused messages of a source wait."""

        def put() -> None:
            REFUSED.make(self._cluster)
            REFUSED.put(self._cluster, {source: report}, of_bridge(source))

        await self._call(put)

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        """Publish a batch and its position in one Kafka transaction.

        For a part of a large transaction, the Kafka transaction stays open until the last part.
        """
        return await self._call(lambda: self._append(batch))

    def _append(self, batch: PackedBridgeBatch) -> Bridged:
        if self._producer is None:
            raise Unavailable("the source is not claimed: claim it first")
        if self._sends_alone and not self._is_to_send_alone:
            raise Unavailable(
                "Kafka accepted messages that it had refused in a larger request; claiming the source again"
            )
        producer = self._producer
        if batch.rollback and self._has_parts:  # the Kafka transaction has only the parts that are rolled back
            if batch.commit:
                raise InvalidRequest(
                    "a large transaction was rolled back to a savepoint after a part of it had been published; Kafka "
                    "cannot take back that part alone: start with --backfill, which takes the rest from the table"
                )
            # Aborting while answers for records are missing would make the producer unusable.
            self._flush(producer)
            self._abort(producer)
        if not self._is_open:
            self._placed_us = 0
        records, never = self._checked(batch.transactions)
        if never:
            return Bridged(self._recorded.position, batch.epoch, refused=never)
        if not self._is_open:
            self._wait_for_quota()
            if producer.is_spent:
                producer = self._renewed()
            producer.begin_transaction()
            self._is_open = True
            self._began, self._bytes = self._monotonic(), 0
            self._write(producer, [opening(self._source)])
        for record in records:
            self._produce(producer, record)
        answer = Bridged(batch.position, batch.epoch, stored=len(batch.transactions))
        if batch.prepare or (self._has_parts and not batch.commit):
            # Parts of a large transaction stay open until it is committed, even if a batch without messages follows.
            self._has_parts = True
            return answer
        self._flush(producer)
        if not self._failed:  # the position comes after all records
            self._place(producer, batch.epoch, batch.position)
            self._flush(producer)
        if self._failed:
            never = self._undo(producer, batch)
            return Bridged(self._recorded.position, batch.epoch, refused=never)
        if self._placed_us and wall_clock() - self._placed_us > LATE_US:
            # After records of the slot's next turn they would be read only in that turn.
            self._abort(producer)
            raise Unavailable("delayed messages took too long on the way to their slots: they are sent again")
        self._commit(producer)
        if self._monotonic() - self._began < QUICK_SECONDS:
            self.most_bytes = min(MOST_BYTES, 2 * self.most_bytes)
        self._granted.update([record.topic for record in records])
        self._is_to_send_alone = self._is_to_send_alone and not batch.transactions
        return answer

    # --- before anything is published -------------------------------------------------------------------------

    def _checked(self, transactions: list[BridgedTransaction]) -> tuple[list[Record], list[Item]]:
        """The records of transactions, and items for those that Kafka will never accept. Makes missing topics."""
        now_us = wall_clock()
        records: list[Record] = []
        never: list[Item] = []
        for transaction in transactions:
            item = self._bad.pop(transaction.id, None) or refusal(transaction, now_us)
            if item is None:
                try:
                    records += [
                        self._record(transaction, number, now_us=now_us) for number in range(len(transaction.messages))
                    ]
                    continue
                except InvalidRequest as error:
                    item = refused(transaction, error)
            never.append(item)
        return records, never

    def _record(self, transaction: BridgedTransaction, number: int, *, now_us: int) -> Record:
        """A message as a record. Raises InvalidRequest if its topic refuses it, or if it withdraws another one."""
        message = transaction.messages[number]
        if message.headers and not _OF_OWN_QUEUES.isdisjoint(message.headers):
            raise InvalidRequest(KAFKA_REFUSES, "withdrawal_refused")
        topic = message.topic
        key, value = message.key.encode() if message.key is not None else None, message.body or b""
        headers = headers_of(transaction, number, message, now_us)
        size = record_bytes(key, value, headers)
        largest = self._largest(topic)
        if size > largest:
            largest = self._topics.largest(topic, refresh=True)
        if size > largest:
            raise InvalidRequest(
                f"its record has {size:,} bytes; topic {topic!r} takes {largest:,}: raise its max.message.bytes",
                "too_large",
                413,
            )
        if largest < self._batch_bytes:
            self._batch_bytes = largest
            raise Unavailable(f"topic {topic!r} takes {largest:,} bytes at once: claiming again, for smaller batches")
        due = due_us(message, now_us)
        slot = WHEELS.place(due, now_us)
        if slot is None:
            return Record(transaction.id, topic, key, value, headers)
        self._placed_us = self._placed_us or now_us
        return Record(transaction.id, slot.topic, key, value, delayed_headers(headers, due, topic), slot.partition)

    def _largest(self, topic: str) -> int:
        try:
            return self._topics.largest(topic)
        except InvalidRequest as error:
            if error.code == "no_topic" and topic in self._granted:  # this user could see the topic before
                raise Unavailable(str(error)) from error
            raise

    # --- the client's transaction -----------------------------------------------------------------------------

    def _wait_for_quota(self) -> None:
        """Wait, before a transaction is opened, until brokers read again: they count what they were sent before."""
        self._closing.wait(max(0.0, min(QUOTAS.until - self._monotonic(), self._throttled_seconds)))

    def _flush(self, producer: TransactionalProducer) -> None:
        """Wait for the answers to all records. If brokers do not read them in time because of a quota, later batches
        are smaller: this one would never pass. Raises KafkaException."""

        def latest() -> float:
            return float("-inf") if self._closing.is_set() else self._began + self._throttled_seconds

        try:
            flush(producer, lambda: self._failed, self._call_seconds, latest)
        except KafkaException as raised:
            if raised.args[0].code() == KafkaError._TIMED_OUT and QUOTAS.until > self._began:
                self.most_bytes = max(LEAST_BYTES, min(self.most_bytes, self._bytes) // 4)
                log.warning("a quota of Kafka's brokers makes batches smaller: %s bytes", f"{self.most_bytes:,}")
            raise

    def _place(self, producer: TransactionalProducer, epoch: int, position: str) -> None:
        """Record the position in the open transaction."""
        self._write(producer, self._recorded.records(epoch, position))

    def _write(self, producer: TransactionalProducer, records: list[tuple[bytes, bytes]]) -> None:
        """Write records of these keys and values into the topic of positions."""
        for key, value in records:
            self._produce(producer, Record("", positions_topic(self._source), key, value, [], PARTITION))

    def _commit(self, producer: TransactionalProducer) -> None:
        producer.commit_transaction(self._call_seconds)
        self._recorded.committed()
        self._is_open = self._has_parts = False

    def _abort(self, producer: TransactionalProducer) -> None:
        producer.abort_transaction(self._call_seconds)
        self._is_open = self._has_parts = False
        self._failed.clear()
        self._withdrawn = None

    def _undo(self, producer: TransactionalProducer, batch: PackedBridgeBatch) -> list[Item]:
        """Abort the open transaction, since brokers refused records; items for the transactions they never accept.

        Raises KafkaException if nothing was refused permanently. Raises Unavailable if the source must be read again
        from the last position: because parts of earlier batches were aborted, too; because the client counts records
        that the broker does not have, so that every later record would fail; or because it is unknown which records are
        to blame.
        """
        if (withdrawn := self._withdrawn) is not None:
            self._end(CLOSE_SECONDS)
            raise withdrawn
        failed, had_parts = dict(self._failed), self._has_parts
        self._abort(producer)
        refused = {name: error for name, error in failed.items() if error.code() in FOR_GOOD}
        if not refused:
            raise KafkaException(next(iter(failed.values())))
        of_records = [name for name, error in refused.items() if error.code() in OF_A_RECORD]
        if len(of_records) > 1 and not self._sends_alone:
            self._is_to_send_alone = True
            raise Unavailable(f"Kafka refuses some of {len(of_records)} transactions: sending their records one by one")
        items = {name: Item(name, 422, code="refused", detail=self._never(e)) for name, e in refused.items()}
        if not of_records and not had_parts and items.keys() <= {t.id for t in batch.transactions}:
            return list(items.values())
        self._bad |= items
        raise Unavailable(f"Kafka refuses {len(items)} transactions: publishing what came with them again")

    def _produce(self, producer: TransactionalProducer, record: Record) -> None:
        name, topic, key, value, headers, partition = record
        self._bytes += len(value)
        failed = partial(self._note_failure, name, topic)
        while True:
            try:
                producer.produce(topic, value, key, partition, headers=headers, on_delivery=failed)
                return
            except BufferError:
                producer.poll(0.1)
            except KafkaException as raised:  # the client already knows that the topic refuses the record
                error = raised.args[0]
                if error.code() not in FOR_GOOD:
                    raise
                return failed(error)

    def _never(self, error: KafkaError) -> str:
        """Why a transaction is never accepted."""
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return f"Kafka: {error.str()}: grant {user_of(self._cluster)} Write on the topic, and have it sent again"
        return f"Kafka: {error.str()}"

    def _note_failure(self, name: str, topic: str, error: KafkaError | None, _: Message | None = None) -> None:
        if error is not None:
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and (
                topic in self._granted or topic.startswith(OWN_TOPICS)
            ):
                self._withdrawn = missing(error, self._cluster, of_bridge(self._source, [topic]))
            # An error that only follows from another one must not replace that one.
            earlier = self._failed.get(name)
            if earlier is None or earlier.code() not in FOR_GOOD:
                self._failed[name] = error

    def _end(self, seconds: float) -> None:
        """Drop the client and abort its open transaction, which would hold up readers of its topics."""
        producer, self._producer = self._producer, None
        if producer is not None and self._is_open:
            try:
                producer.abort_transaction(seconds)
            except (KafkaException, SystemError) as error:
                log.info("the open transaction at Kafka could not be aborted, and ends by its time-out: %s", error)
        self._is_open = self._has_parts = False
        self._failed.clear()
        self._withdrawn = None

    async def _call(self, function: Callable[[], T]) -> T:
        """Call a function in the sink's thread. Raises Conflict if this publisher is fenced, else Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._guarded, function)

    def _guarded(self, function: Callable[[], T]) -> T:
        try:
            return self._with_notify_errors(function)
        except (Unauthorized, Forbidden, InvalidRequest) as refused:
            may_pass = not isinstance(refused, InvalidRequest) or refused.code in (REFUSED_SETTINGS, BROKER_SETTING)
            if self._epoch and may_pass:  # it had access before, and continues once it has access again
                raise Unavailable(str(refused)) from refused
            raise

    def _with_notify_errors(self, function: Callable[[], T]) -> T:
        """Call a function, and translate the client's errors."""
        try:
            return function()
        except (KafkaException, SystemError) as raised:
            # The client reports a fatal error within a callback as the cause of a SystemError.
            cause = raised if isinstance(raised, KafkaException) else raised.__cause__
            self._end(CLOSE_SECONDS)
            if not isinstance(cause, KafkaException):
                raise self._unexplained(raised) from raised
            raise self._translated(cause) from raised

    def _unexplained(self, raised: BaseException) -> NotifyError:
        """The error if the client failed without a reason, as it sometimes does when it is fenced."""
        with contextlib.suppress(KafkaException, NotifyError):
            if 0 < self._epoch < standing(self._cluster, self._source).epoch:
                return stale_epoch(f"another bridge publishes what source {self._source!r} has; stop one of the two")
        return Unavailable(f"Kafka's client failed: {raised}")

    def _translated(self, cause: KafkaException) -> NotifyError:
        """The error for a client's error.

        A publisher is also fenced if its own transaction took too long, or if it claimed the source before and that
        request arrives only now: then no later epoch than its own is recorded.
        """
        error = translated(cause.args[0], self._cluster, of_bridge(self._source or "SOURCE"))
        if isinstance(error, Conflict) and self._epoch:
            try:
                if standing(self._cluster, self._source).epoch <= self._epoch:
                    return Unavailable(
                        f"Kafka ended a transaction that was open for more than {TRANSACTION_SECONDS:g} s, or that "
                        "followed a claim which arrived late"
                    )
            except (KafkaException, NotifyError) as unknown:
                return Unavailable(f"Kafka does not say who publishes for source {self._source!r}: {unknown}")
        return error

    async def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # closed before
            await asyncio.get_running_loop().run_in_executor(self._pool, self._end, CLOSE_SECONDS)
        self._pool.shutdown(wait=False)
