"""Committing what became of records: offsets with progress, and with them, in one transaction, what goes elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from notify.backoff import Backoff
from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import OTHERS_NOW, error_of, is_final, refusal
from notify.client.kafka.retries import Departure, id_of, without_body
from notify.client.kafka.topics import RECORD_BYTES
from notify.client.kafka.window import Window
from notify.kafka.cluster import Cluster
from notify.kafka.codes import FENCED, GONE, TOO_LARGE
from notify.kafka.groups import transactional_id
from notify.kafka.progress import Progress
from notify.kafka.rights import REFUSED
from notify.kafka.transactional import TransactionalProducer

log = logging.getLogger("notify.consumer")

CALL_SECONDS = 20.0
TRANSACTION_SECONDS = 10.0
"""A process that is killed within a transaction holds up readers of its topics for so long."""
GATHER_SECONDS, GATHER_MAX_SECONDS = 0.05, 0.5
"""Between two commits: what ends within this time is committed together."""
SHARE = 4
"""While a commit takes its time, nothing is fetched: the pause after it is so many times as long."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0
GONE_SECONDS = 10.0
"""Partitions that the brokers do not know are left out of commits for so long, and then tried again."""
OUTCOME_SECONDS = 120.0
"""How long the outcome of a transaction is asked for: a broker that is frozen keeps its connections for a minute."""
MOST_LEAVING, LEAVING_BYTES = 1000, 8 << 20
"""One transaction carries so many records or bytes at most, and one record more: it has to end within its time."""
MOST_TOO_LARGE = 1000
Spot = tuple[str, int, int]
"""A topic, a partition and an offset."""


class TooLarge(Exception):
    """A departure that its topic does not take."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(departure.topic)
        self.departure = departure


class Settling:
    """One commit at a time. `for_owner`: all of them are transactions, in which Kafka refuses a former owner."""

    def __init__(self, plan: Plan, cluster: Cluster, feed: Feed, partitions: Partitions) -> None:
        self._plan = plan
        self._cluster = cluster
        self._feed = feed
        self._partitions = partitions
        self._for_owner = plan.sharing == "owner"
        self._producer: TransactionalProducer | None = None
        self._committed: dict[Window, int] = {}
        self._gone: dict[Window, float] = {}
        """Windows of partitions that are gone, and until when they are left out."""
        self._departures: list[Departure] = []
        self._too_large: OrderedDict[Spot, None] = OrderedDict()
        """Records that leave without their bodies, the last MOST_TOO_LARGE. An owner whose producer is spent forgets
        its departures, and they come again."""
        self._lock = asyncio.Lock()
        self.is_fenced = False
        """Another instance owns the group: nothing is committed until this one claims it again."""

    def depart(self, departure: Departure) -> None:
        """A message leaves with the next commit."""
        departure.window.leave(departure.item)
        if _place_of(departure) in self._too_large:
            departure = without_body(self._plan.group, departure)
        self._departures.append(departure)
        self._partitions.changed.set()

    def renew(self) -> None:
        """Have the next commit be of all partitions."""
        self._committed = {window: -1 for _, window in self._partitions.items()}
        self._partitions.changed.set()

    async def run(self) -> None:
        """Commit what changes, until cancelled. Raises what trying again cannot help."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            await self._partitions.changed.wait()
            self._partitions.changed.clear()
            began = time.monotonic()
            if await self.settle():
                backoff.reset()
                took = time.monotonic() - began
                await asyncio.sleep(min(max(GATHER_SECONDS, SHARE * took), GATHER_MAX_SECONDS))
            else:
                self._partitions.changed.set()
                await asyncio.sleep(backoff.next())

    async def settle(self) -> bool:
        """Commit now what is done; False where Kafka does not take it now.

        Raises Unauthorized, Forbidden, InvalidRequest; Conflict where another instance owns the group. A commit goes on
        in its thread where the caller is cancelled, and the next one waits for its end: what leaves would leave twice.
        """
        return await asyncio.shield(asyncio.ensure_future(self._settle()))

    async def finished(self) -> None:
        """Wait for a commit that is under way."""
        async with self._lock:
            pass

    async def _settle(self) -> bool:
        async with self._lock:
            self._departures = [d for d in self._departures if not d.window.is_closed]
            leaving = self._next_to_leave()
            left_by = _by_window(leaving)
            now = time.monotonic()
            self._gone = {window: until for window, until in self._gone.items() if until > now}
            changed = [
                (place, window, window.changes)
                for place, window in self._partitions.items()
                if (window.changes != self._committed.get(window, 0) or window in left_by) and window not in self._gone
            ]
            if self._for_owner and self._producer is None:
                # Its last transaction may not have ended. To claim the group here could fence a new owner.
                self.is_fenced = True
            if not (changed or leaving) or self.is_fenced:
                return True
            windows = {place: window for place, window, _ in changed}
            try:
                await self._commit(windows, leaving)
            except TooLarge as refused:
                self._shorten(refused.departure)
                return False
            except KafkaException as raised:
                if leaving and error_of(raised).code() in REFUSED:
                    await self._commit_what_stays(windows)
                self._refused(raised)
                return False
            for departure in leaving:
                if not departure.window.is_closed:
                    departure.window.finish(departure.item)
                    self._partitions.look(departure.window)
            self._departures = self._departures[len(leaving) :]
            open_windows = {window for _, window in self._partitions.items()}
            self._committed = {w: n for w, n in self._committed.items() if w in open_windows}
            for _, window, changes in changed:
                # An item that has arrived is one change more, which changes nothing of what is committed.
                if window not in self._gone:
                    self._committed[window] = changes + sum([d.window is window for d in leaving])
            if self._departures:
                self._partitions.changed.set()
            return True

    async def _commit(self, windows: Mapping[Place, Window], leaving: list[Departure], *, stays: bool = False) -> None:
        """Raises KafkaException, TooLarge."""
        left_by = _by_window(leaving)
        offsets = [
            _committable(place, window.progress(left_by.get(window, ()), stays=stays))
            for place, window in windows.items()
        ]
        if leaving or self._for_owner:
            try:
                await asyncio.to_thread(self._transact, leaving, offsets, self._feed.member)
            except KafkaException as raised:
                are_gone = error_of(raised).code() in GONE and await self._leave_out(windows)
                if not are_gone or self._for_owner:  # by now the group may be another's: the next commit goes on
                    raise
                there = {place: window for place, window in windows.items() if window not in self._gone}
                await self._commit(there, leaving, stays=stays)
        else:
            await self._feed.thread.call_also_within(commit_offsets, self._feed.consumer, offsets)

    async def _leave_out(self, windows: Mapping[Place, Window]) -> bool:
        """Leave out those that are gone, since one refuses the whole transaction; whether there are any."""
        listed = await self._feed.thread.call_also_within(
            partial(self._feed.consumer.list_topics, timeout=CALL_SECONDS)
        )
        there = {(name, n) for name, topic in listed.topics.items() for n in topic.partitions}
        gone = {place: window for place, window in windows.items() if place not in there}
        self._gone |= dict.fromkeys(gone.values(), time.monotonic() + GONE_SECONDS)
        if gone:
            log.warning(
                "partitions of group %s are gone, and what was done there is not committed: %s",
                self._plan.group,
                ", ".join(f"{topic}/{n}" for topic, n in gone),
            )
        return bool(gone)

    async def _commit_what_stays(self, windows: Mapping[Place, Window]) -> None:
        """The right to write what leaves is missing, which ends the consumer: what was done beside it stays done."""
        if self._for_owner and self._producer is None:
            return  # whether its last transaction has ended is not known, see _settle
        try:
            await self._commit(windows, [], stays=True)
        except KafkaException as raised:
            log.warning("what group %s has done is not committed, and comes again: %s", self._plan.kafka_group, raised)

    def _next_to_leave(self) -> list[Departure]:
        """The first of the departures, as many as one transaction carries within its time."""
        count, room = 0, LEAVING_BYTES
        for departure in self._departures[:MOST_LEAVING]:
            room -= departure.item.size
            if room < 0 and count:
                break
            count += 1
        return self._departures[:count]

    def _shorten(self, departure: Departure) -> None:
        """Have a record leave without its body that no topic takes with it: it would hold up all commits."""
        log.error(
            "message %s is too large for topic %s: it becomes a dead letter without body",
            id_of(departure.item.record), departure.topic,
        )  # fmt: skip
        self._too_large[_place_of(departure)] = None
        if len(self._too_large) > MOST_TOO_LARGE:
            self._too_large.popitem(last=False)
        at = next(n for n, known in enumerate(self._departures) if known is departure)
        self._departures[at] = without_body(self._plan.group, departure)

    def _refused(self, raised: KafkaException) -> None:
        error = error_of(raised)
        if error.code() in FENCED:
            # An owner's membership says what is next; else another process has this instance's name, or had it before.
            self.is_fenced = self._for_owner and self._producer is None
        elif is_final(error):
            raise refusal(error, self._cluster, self._plan.kafka_group) from raised
        level = logging.DEBUG if error.code() in OTHERS_NOW else logging.WARNING
        log.log(level, "Kafka does not take the offsets of group %s now: %s", self._plan.kafka_group, error.str())

    # --- in a thread ------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make the producer of transactions; whoever has its transactional id is fenced. Raises KafkaException."""
        own = {
            "transactional.id": transactional_id(
                self._plan.kafka_group, "" if self._for_owner else self._plan.instance
            ),
            "transaction.timeout.ms": round(TRANSACTION_SECONDS * 1000),
            "message.max.bytes": RECORD_BYTES,
        }
        producer = self._cluster.transactional_producer(own)
        producer.init_transactions(CALL_SECONDS)
        self._producer = producer
        self.is_fenced = False

    def _transact(self, leaving: list[Departure], offsets: list[TopicPartition], group: Any) -> None:
        """Departures and offsets, all or none."""
        if self._producer is None:
            self.claim()
        producer = self._producer
        assert producer is not None
        too_large: list[Departure] = []
        try:
            producer.begin_transaction()
            for d in leaving:
                self._produce(producer, d, too_large)
            producer.send_offsets_to_transaction(offsets, group, CALL_SECONDS)
            self._end(producer)
        except KafkaException as raised:
            if error_of(raised).fatal() or error_of(raised).code() in FENCED:
                self._drop(producer)
                raise
            self._abort(producer)
            if producer.is_spent:
                self._drop(producer)
            if too_large and too_large[0].has_body:
                raise TooLarge(too_large[0]) from raised
            raise

    def _produce(self, producer: TransactionalProducer, departure: Departure, too_large: list[Departure]) -> None:
        """`too_large` gets the departure if Kafka, or its client, says so now or later."""

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None and error.code() in TOO_LARGE:
                too_large.append(departure)

        record = departure.item.record
        value, key = (record.value(), record.key()) if departure.has_body else (None, None)
        try:
            producer.produce(
                departure.topic, value, key,
                partition=departure.partition, headers=departure.headers, on_delivery=delivered,
            )  # fmt: skip
        except KafkaException as raised:
            delivered(error_of(raised), record)
            raise

    def _end(self, producer: TransactionalProducer) -> None:
        """Commit a transaction, and ask for its outcome for as long as the brokers may need.

        One that is given up while its outcome is not known would be written again by the next.
        """
        deadline = time.monotonic() + OUTCOME_SECONDS
        while True:
            try:
                return producer.commit_transaction(CALL_SECONDS)
            except KafkaException as raised:
                error = error_of(raised)
                if not error.retriable() or time.monotonic() > deadline:
                    raise
                log.debug("Kafka has not said yet whether a transaction is committed: %s", error.str())

    def _abort(self, producer: TransactionalProducer) -> None:
        try:
            producer.abort_transaction(CALL_SECONDS)
        except KafkaException as raised:
            # A new producer of the same id aborts what this one has left open.
            log.debug("Kafka does not abort a transaction: %s", error_of(raised).str())
            self._drop(producer)

    def _drop(self, producer: TransactionalProducer) -> None:
        """Use a producer no more. A commit may fail after the group was claimed anew, which fenced its producer."""
        if self._producer is producer:
            self._producer = None


def commit_offsets(consumer: Any, offsets: list[TopicPartition]) -> None:
    """Commit offsets of several partitions. Raises KafkaException, also where only some are refused.

    A partition that is gone has nothing to commit any more.
    """
    for partition in consumer.commit(offsets=offsets, asynchronous=False):
        if partition.error is not None and partition.error.code() not in GONE:
            raise KafkaException(partition.error)


def _place_of(departure: Departure) -> Spot:
    """Where the record of a departure is."""
    record = departure.item.record
    return record.topic(), record.partition(), record.offset()


def _by_window(departures: Sequence[Departure]) -> dict[Window, set[int]]:
    """The offsets of departures, by window."""
    offsets: dict[Window, set[int]] = {}
    for departure in departures:
        offsets.setdefault(departure.window, set()).add(departure.item.offset)
    return offsets


def _committable(place: Place, progress: Progress) -> TopicPartition:
    return TopicPartition(*place, progress.offset, progress.metadata())
