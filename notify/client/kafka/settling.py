"""Committing what became of records: offsets with progress, and with them, in one transaction, what goes elsewhere."""

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

from notify.backoff import Backoff
from notify.client.handler_threads import HandlerThreads
from notify.client.kafka.feed import Feed
from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import OTHERS_NOW, error_of, is_final, refusal
from notify.client.kafka.retries import Departure, id_of, without_body
from notify.client.kafka.transactions import CALL_SECONDS, OutcomeUnknown, TooLarge, Transactions
from notify.client.kafka.window import Window
from notify.kafka.cluster import Cluster
from notify.kafka.codes import FENCED, GONE
from notify.kafka.progress import Progress
from notify.kafka.rights import REFUSED

log = logging.getLogger("notify.consumer")

GATHER_SECONDS, GATHER_MAX_SECONDS = 0.05, 0.5
"""Between two commits: what ends within this time is committed together."""
SHARE = 4
"""While a commit takes its time, nothing is fetched: the pause after it is so many times as long."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0
GONE_SECONDS = 10.0
"""Partitions that the brokers do not know are left out of commits for so long, and then tried again."""
MOST_LEAVING, LEAVING_BYTES = 1000, 8 << 20
"""One transaction carries so many records or bytes at most, and one record more: it has to end within its time."""
MOST_TOO_LARGE = 1000
Spot = tuple[str, int, int]
"""A topic, a partition and an offset."""


@dataclass(frozen=True)
class InDoubt:
    """A transaction whose outcome nobody has said: the records that left with it, and its offsets."""

    leaving: list[Departure]
    offsets: list[TopicPartition]


class Settling:
    """One commit at a time. `for_owner`: all of them are transactions, in which Kafka refuses a former owner."""

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
        """Windows of partitions that are gone, and until when they are left out."""
        self._departures: list[Departure] = []
        self._too_large: OrderedDict[Spot, None] = OrderedDict()
        """Records that leave without their bodies, the last MOST_TOO_LARGE. An owner whose producer is spent forgets
        its departures, and they come again."""
        self._in_doubt: InDoubt | None = None
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
            if self._in_doubt is not None:
                try:
                    await self._resolve(self._in_doubt)
                except KafkaException as raised:
                    self._refused(raised)
                    return False
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
            if self._for_owner and not self._transactions.are_claimed:
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
            except OutcomeUnknown as raised:
                if not self._for_owner:  # an owner begins anew, at what is committed by then
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
                # An item that has arrived is one change more, which changes nothing of what is committed.
                if window not in self._gone:
                    self._committed[window] = changes + sum([d.window is window for d in leaving])
            if self._departures:
                self._partitions.changed.set()
            return True

    async def _resolve(self, doubt: InDoubt) -> None:
        """Learn whether a transaction was committed: what left with it would leave again. Raises KafkaException."""
        if not self._transactions.are_claimed:
            await self.claim()  # the transaction has ended by then
        left = {(d.item.record.topic(), d.item.record.partition()) for d in doubt.leaving if not d.window.is_closed}
        sent = {(p.topic, p.partition): (p.offset, p.metadata) for p in doubt.offsets}
        asked = [TopicPartition(*place) for place in left if place in sent]
        known = []
        if asked:
            known = await self._feed.thread.call_also_within(
                partial(self._feed.consumer.committed, asked, timeout=CALL_SECONDS)
            )
        # All or none were committed. Progress with a record that left in it is in no commit before.
        if any((p.offset, p.metadata) == sent[p.topic, p.partition] for p in known):
            log.warning("a transaction of group %s was committed, though no answer came", self._plan.kafka_group)
            self._arrived(doubt.leaving)
        self._in_doubt = None

    def _arrived(self, departures: Sequence[Departure]) -> None:
        """These are in their topics, and committed with the group's progress."""
        for departure in departures:
            if not departure.window.is_closed:
                departure.window.finish(departure.item)
                self._partitions.look(departure.window)
        arrived = {id(departure) for departure in departures}
        self._departures = [departure for departure in self._departures if id(departure) not in arrived]

    async def _commit(self, windows: Mapping[Place, Window], leaving: list[Departure], *, stays: bool = False) -> None:
        """Raises KafkaException, OutcomeUnknown, TooLarge."""
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
                if not are_gone or self._for_owner:  # by now the group may be another's: the next commit goes on
                    raise
                remaining = {place: window for place, window in windows.items() if window not in self._gone}
                await self._commit(remaining, leaving, stays=stays)
        else:
            await self._feed.thread.call_also_within(commit_offsets, self._feed.consumer, offsets)

    async def _leave_out(self, windows: Mapping[Place, Window]) -> bool:
        """Leave out those that are gone, since one refuses the whole transaction; whether there are any."""
        listed = await self._feed.thread.call_also_within(
            partial(self._feed.consumer.list_topics, timeout=CALL_SECONDS)
        )
        listed_places = {(name, n) for name, topic in listed.topics.items() for n in topic.partitions}
        gone = {place: window for place, window in windows.items() if place not in listed_places}
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
        if self._for_owner and not self._transactions.are_claimed:
            return  # whether its last transaction has ended is not known, see _settle
        try:
            await self._commit(windows, [], stays=True)
        except (KafkaException, OutcomeUnknown) as raised:
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
            self.is_fenced = self._for_owner and not self._transactions.are_claimed
        elif is_final(error):
            raise refusal(error, self._cluster, self._plan.kafka_group) from raised
        level = logging.DEBUG if error.code() in OTHERS_NOW else logging.WARNING
        log.log(level, "Kafka does not take the offsets of group %s now: %s", self._plan.kafka_group, error.str())

    async def claim(self) -> None:
        """Make the producer of transactions; whoever has its id is fenced. Raises KafkaException."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._transactions.claim)
        self.is_fenced = False


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
