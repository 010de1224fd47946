"""Settling: commits the group's progress, and in the same transaction the records that go to other topics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import OTHERS_NOW, error_of, is_final, refusal
from notify.client.kafka.retries import Departure, id_of, without_body
from notify.client.kafka.transactions import CALL_SECONDS, DepartureTooLarge, OutcomeUnknown, Transactions
from notify.client.kafka.window import Window
from notify.client.threads.handler_threads import HandlerThreads
from notify.kafka.cluster import Cluster
from notify.kafka.codes import FENCED, GONE
from notify.kafka.progress import Progress
from notify.kafka.rights import REFUSED
from notify.runtime.backoff import Backoff
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

GATHER_SECONDS, GATHER_MAX_SECONDS = 0.05, 0.5
"""The bounds of the pause between two commits: records that are done within it are committed together."""
SHARE = 4
"""The pause after a commit is this many times as long as the commit, during which nothing is fetched."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0
GONE_SECONDS = 10.0
"""How long partitions that the brokers do not know are left out of commits, before they are tried again."""
MOST_LEAVING, LEAVING_BYTES = 1000, 8 << 20
"""The most records and bytes (except for one larger record) of a transaction, which must end within its time."""
MOST_TOO_LARGE = 1000
Spot = tuple[str, int, int]
"""A topic, a partition and an offset."""


@dataclass(frozen=True)
class InDoubt:
    """A transaction whose outcome is unknown: the departures in it, and its offsets."""

    leaving: list[Departure]
    offsets: list[TopicPartition]


class Settling:
    """Commits for one consumer, one commit at a time. An owner commits only in transactions, so that Kafka refuses the
    commits of a former owner."""

    def __init__(
        self, plan: Plan, cluster: Cluster, feed: Feed, partitions: Partitions, threads: HandlerThreads
    ) -> None:
        """`threads` make the calls of transactions."""
        self._plan = plan
        self._cluster = cluster
        self._feed = feed
        self._partitions = partitions
        self._threads = threads
        self._for_owner = plan.sharing == "owner"
        self._transactions = Transactions(plan, cluster)
        self._committed: dict[Window, int] = {}
        self._gone: dict[Window, float] = {}
        """The windows of partitions that are gone, and until when they are left out of commits."""
        self._departures: list[Departure] = []
        self._too_large: OrderedDict[Spot, None] = OrderedDict()
        """The last MOST_TOO_LARGE records that have to leave without their bodies. An owner whose producer is spent
        forgets its departures, and the records come again."""
        self._in_doubt: InDoubt | None = None
        self._lock = asyncio.Lock()
        self.is_fenced = False
        """Whether another instance owns the group: nothing is committed until this instance claims it again."""

    def depart(self, departure: Departure) -> None:
        """Let a message leave for another topic with the next commit."""
        departure.window.leave(departure.item)
        if _place_of(departure) in self._too_large:
            departure = without_body(self._plan.group, departure)
        self._departures.append(departure)
        self._partitions.changed.set()

    def renew(self) -> None:
        """Let the next commit include all partitions, even unchanged ones."""
        self._committed = {window: -1 for _, window in self._partitions.items()}
        self._partitions.changed.set()

    async def run(self) -> None:
        """Commit changed progress until cancelled. Raises errors that a retry cannot mend."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            await self._partitions.changed.wait()
            self._partitions.changed.clear()
            began = time.monotonic()
            if await self.settle():
                backoff.reset()
                seconds = time.monotonic() - began
                await asyncio.sleep(min(max(GATHER_SECONDS, SHARE * seconds), GATHER_MAX_SECONDS))
            else:
                self._partitions.changed.set()
                await asyncio.sleep(backoff.next())

    async def settle(self) -> bool:
        """Commit the progress now; False if Kafka does not accept it at the moment.

        Raises Unauthorized, Forbidden, InvalidRequest; Conflict if another instance owns the group. If the caller is
        cancelled, the commit continues in its thread, and the next commit waits for it, so that no record leaves twice.
        """
        return await asyncio.shield(asyncio.ensure_future(self._settle()))

    async def finished(self) -> None:
        """Wait for the current commit, if there is one."""
        async with self._lock:
            pass

    async def _settle(self) -> bool:
        async with self._lock:
            if self._in_doubt is not None:
                try:
                    await self._resolve(self._in_doubt)
                except KafkaException as raised:
                    self._refused(raised)
                    return False
            self._departures = [departure for departure in self._departures if not departure.window.is_closed]
            leaving = self._next_to_leave()
            left_by = _by_window(leaving)
            now = time.monotonic()
            self._gone = {window: until for window, until in self._gone.items() if until > now}
            changed = [
                (place, window, window.changes)
                for place, window in self._partitions.items()
                if (window.changes != self._committed.get(window, 0) or window in left_by) and window not in self._gone
            ]
            if self._for_owner and not self._transactions.are_claimed:
                # The last transaction may not have ended. Claiming the group here could fence a new owner.
                self.is_fenced = True
            if not (changed or leaving) or self.is_fenced:
                return True
            windows = {place: window for place, window, _ in changed}
            try:
                await self._commit(windows, leaving)
            except DepartureTooLarge as refused:
                self._shorten(refused.departure)
                return False
            except OutcomeUnknown as raised:
                if not self._for_owner:  # an owner starts again from the progress that is committed by then
                    self._in_doubt = InDoubt(leaving, raised.offsets)
                self._refused(raised.error)
                return False
            except KafkaException as raised:
                if leaving and error_of(raised).code() in REFUSED:
                    await self._commit_what_stays(windows)
                self._refused(raised)
                return False
            self._arrived(leaving)
            open_windows = {window for _, window in self._partitions.items()}
            self._committed = {w: n for w, n in self._committed.items() if w in open_windows}
            for _, window, changes in changed:
                # An arrived item adds a change to its window, but the committed progress includes it already.
                if window not in self._gone:
                    self._committed[window] = changes + sum([d.window is window for d in leaving])
            if self._departures:
                self._partitions.changed.set()
            return True

    async def _resolve(self, doubt: InDoubt) -> None:
        """Find out whether a transaction was committed, so that its departures do not leave twice. Raises
        KafkaException."""
        if not self._transactions.are_claimed:
            await self.claim()  # the transaction has ended once the claim returns
        places = {(d.item.record.topic(), d.item.record.partition()) for d in doubt.leaving if not d.window.is_closed}
        sent = {(p.topic, p.partition): (p.offset, p.metadata) for p in doubt.offsets}
        partitions = [TopicPartition(*place) for place in places if place in sent]
        committed = []
        if partitions:
            committed = await self._feed.thread.call_also_within(
                partial(self._feed.consumer.committed, partitions, timeout=CALL_SECONDS)
            )
        # All offsets were committed, or none. No earlier commit has progress that includes these departures.
        if any((p.offset, p.metadata) == sent[p.topic, p.partition] for p in committed):
            log.warning("a transaction of group %s was committed, though no answer came", self._plan.kafka_group)
            self._arrived(doubt.leaving)
        self._in_doubt = None

    def _arrived(self, departures: Sequence[Departure]) -> None:
        """Finish departures that are committed, in their topics and with the group's progress."""
        for departure in departures:
            if not departure.window.is_closed:
                departure.window.finish(departure.item)
                self._partitions.look(departure.window)
        arrived = {id(departure) for departure in departures}
        self._departures = [departure for departure in self._departures if id(departure) not in arrived]

    async def _commit(self, windows: Mapping[Place, Window], leaving: list[Departure], *, stays: bool = False) -> None:
        """Raises KafkaException, OutcomeUnknown, DepartureTooLarge."""
        left_by = _by_window(leaving)
        offsets = [
            _committable(place, window.progress(left_by.get(window, ()), stays=stays))
            for place, window in windows.items()
        ]
        if leaving or self._for_owner:
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._transactions.commit, leaving, offsets, self._feed.member
                )
            except KafkaException as raised:
                are_gone = error_of(raised).code() in GONE and await self._leave_out(windows)
                if not are_gone or self._for_owner:  # an owner may have been replaced: the next commit finds out
                    raise
                remaining = {place: window for place, window in windows.items() if window not in self._gone}
                await self._commit(remaining, leaving, stays=stays)
        else:
            await self._feed.thread.call_also_within(commit_offsets, self._feed.consumer, offsets)

    async def _leave_out(self, windows: Mapping[Place, Window]) -> bool:
        """Leave partitions that are gone out of commits, since Kafka refuses the whole transaction because of one;
        returns whether any are gone."""
        # Not by the feed's client: if it were asked this within a callback, its next callback would abort the process.
        listed = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._cluster.admin().list_topics(timeout=CALL_SECONDS)
        )
        listed_places = {(name, n) for name, topic in listed.topics.items() for n in topic.partitions}
        gone = {place: window for place, window in windows.items() if place not in listed_places}
        self._gone |= dict.fromkeys(gone.values(), time.monotonic() + GONE_SECONDS)
        if gone:
            log.warning(
                "partitions of group %s are gone, and their progress is not committed: %s",
                self._plan.group,
                ", ".join(f"{topic}/{n}" for topic, n in gone),
            )
        return bool(gone)

    async def _commit_what_stays(self, windows: Mapping[Place, Window]) -> None:
        """Commit the progress without the departures, when the missing right to write them ends the consumer."""
        if self._for_owner and not self._transactions.are_claimed:
            return  # it is unknown whether the last transaction has ended, see _settle
        try:
            await self._commit(windows, [], stays=True)
        except (KafkaException, OutcomeUnknown) as raised:
            log.warning(
                "the progress of group %s is not committed, its messages come again: %s", self._plan.kafka_group, raised
            )

    def _next_to_leave(self) -> list[Departure]:
        """The first departures, as many as one transaction may contain."""
        count, room = 0, LEAVING_BYTES
        for departure in self._departures[:MOST_LEAVING]:
            room -= departure.item.size
            if room < 0 and count:
                break
            count += 1
        return self._departures[:count]

    def _shorten(self, departure: Departure) -> None:
        """Let a record leave without its body, because it is too large and would hold up all commits."""
        log.error(
            "message %s is too large for topic %s: it becomes a dead letter without body",
            id_of(departure.item.record), departure.topic,
        )  # fmt: skip
        self._too_large[_place_of(departure)] = None
        if len(self._too_large) > MOST_TOO_LARGE:
            self._too_large.popitem(last=False)
        index = next(n for n, waiting in enumerate(self._departures) if waiting is departure)
        self._departures[index] = without_body(self._plan.group, departure)

    def _refused(self, raised: KafkaException) -> None:
        error = error_of(raised)
        if error.code() in FENCED:
            # An owner learns from its ownership what to do next. Otherwise another process uses this instance's name.
            self.is_fenced = self._for_owner and not self._transactions.are_claimed
        elif is_final(error):
            raise refusal(error, self._cluster, self._plan.kafka_group) from raised
        level = logging.DEBUG if error.code() in OTHERS_NOW else logging.WARNING
        log.log(level, "Kafka does not accept the offsets of group %s now: %s", self._plan.kafka_group, error.str())

    async def claim(self) -> None:
        """Make the producer of transactions, which fences any other producer with its id. Raises KafkaException."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._transactions.claim)
        self.is_fenced = False

    async def close(self, seconds: float) -> None:
        """End the producer of transactions, after the last commit. Waits at most `seconds` for its connections."""
        ending = asyncio.get_running_loop().run_in_executor(self._threads, self._transactions.close)
        await asyncio.wait([ending], timeout=seconds)


def commit_offsets(consumer: Any, offsets: list[TopicPartition]) -> None:
    """Commit offsets of several partitions. Raises KafkaException even if only some are refused.

    The refusal of a partition that is gone is ignored.
    """
    for partition in consumer.commit(offsets=offsets, asynchronous=False):
        if partition.error is not None and partition.error.code() not in GONE:
            raise KafkaException(partition.error)


def _place_of(departure: Departure) -> Spot:
    """The place of a departure's record."""
    record = departure.item.record
    return record.topic(), record.partition(), record.offset()


def _by_window(departures: Sequence[Departure]) -> dict[Window, set[int]]:
    """The offsets of departures, grouped by window."""
    offsets: dict[Window, set[int]] = {}
    for departure in departures:
        offsets.setdefault(departure.window, set()).add(departure.item.offset)
    return offsets


def _committable(place: Place, progress: Progress) -> TopicPartition:
    return TopicPartition(*place, progress.offset, progress.metadata())
