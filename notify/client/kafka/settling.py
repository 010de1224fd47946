"""Committing what became of records: offsets with progress, and with them, in one transaction, what goes elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, Producer, TopicPartition

from notify.backoff import Backoff
from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import FENCED, OTHERS_NOW, error_of, is_final, refusal
from notify.client.kafka.retries import Departure
from notify.client.kafka.window import Window
from notify.errors import Conflict
from notify.kafka.cluster import Cluster
from notify.kafka.groups import transactional_id
from notify.kafka.progress import Progress

log = logging.getLogger("notify.consumer")

CALL_SECONDS = 20.0
TRANSACTION_SECONDS = 10.0
"""A process that is killed within a transaction holds up readers of its topics for so long."""
GATHER_SECONDS, GATHER_MAX_SECONDS = 0.05, 0.5
"""Between two commits: what ends within this time is committed together."""
SHARE = 4
"""While a commit takes its time, nothing is fetched: the pause after it is so many times as long."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0
RECORD_BYTES = 4 << 20
"""The client's bound of a record: a message of the most bytes, with all that a retry adds to its headers."""


class Settling:
    """One commit at a time. `for_owner`: all of them are transactions, in which Kafka refuses a former owner."""

    def __init__(self, plan: Plan, cluster: Cluster, feed: Feed, partitions: Partitions) -> None:
        self._plan = plan
        self._cluster = cluster
        self._feed = feed
        self._partitions = partitions
        self._for_owner = plan.sharing == "owner"
        self._producer: Producer | None = None
        self._committed: dict[Window, int] = {}
        self._departures: list[Departure] = []
        self._lock = asyncio.Lock()
        self.is_fenced = False
        """Another instance owns the group: nothing is committed until this one claims it again."""

    def depart(self, departure: Departure) -> None:
        """A message leaves with the next commit."""
        departure.window.leave(departure.item)
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
            leaving = list(self._departures)
            changed = [
                (place, window, window.changes)
                for place, window in self._partitions.items()
                if window.changes != self._committed.get(window, 0)
            ]
            if self._for_owner and self._producer is None:
                # Its last transaction may not have ended. To claim the group here could fence a new owner.
                self.is_fenced = True
            if not changed or self.is_fenced:
                return True
            offsets = [_committable(place, window.progress()) for place, window, _ in changed]
            try:
                if leaving or self._for_owner:
                    await asyncio.to_thread(self._transact, leaving, offsets, self._feed.member)
                else:
                    await self._feed.thread.call_also_within(
                        partial(self._feed.consumer.commit, offsets=offsets, asynchronous=False)
                    )
            except KafkaException as raised:
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
                self._committed[window] = changes + sum([d.window is window for d in leaving])
            if self._departures:
                self._partitions.changed.set()
            return True

    def _refused(self, raised: KafkaException) -> None:
        error = error_of(raised)
        if self._for_owner and error.code() in OTHERS_NOW:
            raise Conflict(
                f"group {self._plan.group!r} has consumers of another mode; stop them first", "mode_in_use"
            ) from raised
        if error.code() in FENCED:
            # An owner's membership says what is next; else another process has this instance's name, or had it before.
            self._producer = None
            self.is_fenced = self._for_owner
        elif is_final(error):
            raise refusal(error, self._cluster, self._plan.kafka_group) from raised
        level = logging.DEBUG if error.code() in OTHERS_NOW else logging.WARNING
        log.log(level, "Kafka does not take the offsets of group %s now: %s", self._plan.kafka_group, error.str())

    # --- in a thread ------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make the producer of transactions; whoever has its transactional id is fenced. Raises KafkaException."""
        producer = self._cluster.producer(
            {
                "transactional.id": transactional_id(
                    self._plan.kafka_group, "" if self._for_owner else self._plan.instance
                ),
                "transaction.timeout.ms": round(TRANSACTION_SECONDS * 1000),
                "message.max.bytes": RECORD_BYTES,
            }
        )
        producer.init_transactions(CALL_SECONDS)
        self._producer = producer
        self.is_fenced = False

    def _transact(self, leaving: list[Departure], offsets: list[TopicPartition], group: Any) -> None:
        """Departures and offsets, all or none."""
        if self._producer is None:
            self.claim()
        producer = self._producer
        assert producer is not None
        try:
            producer.begin_transaction()
            for d in leaving:
                record = d.item.record
                producer.produce(d.topic, record.value(), record.key(), partition=d.partition, headers=d.headers)
            producer.send_offsets_to_transaction(offsets, group, CALL_SECONDS)
            producer.commit_transaction(CALL_SECONDS)
        except KafkaException as raised:
            if error_of(raised).fatal():
                self._producer = None
                raise
            self._abort(producer)
            raise

    def _abort(self, producer: Producer) -> None:
        try:
            producer.abort_transaction(CALL_SECONDS)
        except KafkaException as raised:
            # A new producer of the same id aborts what this one has left open.
            log.debug("Kafka does not abort a transaction: %s", error_of(raised).str())
            self._producer = None


def _committable(place: Place, progress: Progress) -> TopicPartition:
    return TopicPartition(*place, progress.offset, progress.metadata())
