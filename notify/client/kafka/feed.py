"""Feed: Kafka's client of one consumer, in a separate thread; it fetches records and takes calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from notify.client.kafka.partitions import Partitions, Place
from notify.client.kafka.refusals import error_of, is_final, refusal
from notify.client.kafka.window import Item, Window
from notify.errors import Unavailable
from notify.kafka import records
from notify.kafka.brokers import known_topics
from notify.kafka.calls import leave
from notify.kafka.client_thread import ClientThread
from notify.kafka.cluster import Cluster
from notify.kafka.diagnosis import refuses
from notify.kafka.groups import RETRY
from notify.runtime.backoff import Backoff
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")
T = TypeVar("T")

ANSWER_SECONDS = 10.0
"""The timeout for the brokers' first answer."""
RETRY_SECONDS, RETRY_MAX_SECONDS, PATIENCE_SECONDS = 0.1, 2.0, 30.0
SESSION_SECONDS = 6
"""How long a killed consumer keeps its partitions; Kafka's default of 45 s is for slow machines."""
LEAVE_SECONDS = 60.0
"""How long leaving the group may take: the last commit takes 20 s at most, and brokers may be slow."""
POLL_INTERVAL_SECONDS = 300
"""A consumer that does not poll for this time loses its partitions, even if its heartbeats continue."""
QUEUED_KILOBYTES = 16 << 10
"""The most memory for records that the client has fetched and nobody has polled, for all partitions together."""
FETCHED_BYTES = 8 << 20
"""The most bytes in one answer of a broker, except for a single larger record."""
_SIZES = {
    "queued.max.messages.kbytes": str(QUEUED_KILOBYTES), "fetch.max.bytes": str(FETCHED_BYTES),
    "queued.min.messages": "10000", "fetch.queue.backoff.ms": "20",
}  # fmt: skip
"""Bounds of memory, which the operators' settings may change. When a bound is reached, the client stops fetching for
the last of these times. Its default of 1 s would limit the consumer to about 12,000 small records a second."""
POLLED_BYTES = 4 << 20
"""The memory of records after which one poll ends. If records become larger suddenly, one poll may bring all that the
client has fetched, at most QUEUED_KILOBYTES and one more answer."""
HIDDEN_SECONDS = 120.0
"""How long a transaction of another producer may hide records before that is logged; those of bridges end sooner."""
ITEM_BYTES = 200
"""The memory of a record without its key and value."""
EXPECTED_BYTES = 16 << 10
"""The memory of a record that the first poll expects; later ones expect what came last."""
CLIENT_RECOVERS = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
        KafkaError._MAX_POLL_EXCEEDED, KafkaError._PARTITION_EOF, KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE,
    )
)  # fmt: skip
"""Errors that the client recovers from by itself."""


Fetched = tuple[Window, list[Item]]
"""Neighbouring records of a partition, in the order of their offsets, and the window that they were fetched for."""
End = tuple[Place, Window, int]
"""A partition that was read to its end, its window, and the end's offset."""
MOST_POLLED = 2_000
MOST_LOW = 32
QUICK_SECONDS = 0.2
"""If a whole lot is handled within this time, the next lot is larger."""


class Feed:
    """Fetches records into windows. Call `consumer` only in `thread`. Make a Feed on its event loop."""

    def __init__(self, cluster: Cluster, group: str, instance: str, partitions: Partitions) -> None:
        """`group`: the name of Kafka's group. Raises InvalidRequest for settings that Kafka's client refuses."""
        self._cluster = cluster
        self._group = group
        self._partitions = partitions
        self._fault: KafkaError | None = None
        self._record_bytes = EXPECTED_BYTES
        self._hiding: dict[Place, tuple[int, float]] = {}
        """The partitions whose next records an open transaction hides: the first hidden offset, and since when."""
        self._told_hidden: set[Place] = set()
        """Those of them that were logged."""
        self.member: Any = None
        """The metadata of this member of the group since its last rebalance. Kafka refuses the transactions of an
        expelled member. A client that knows that it was expelled has no member id, and Kafka would not refuse it."""
        self.consumer: Consumer = cluster.consumer(
            {name: value for name, value in _SIZES.items() if name not in cluster.settings}
            | {
                "group.id": group,
                "client.id": instance,
                # Every fetch has an offset. If retention has deleted its record, the next retained one comes.
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "cooperative-sticky",
                "metadata.max.age.ms": 10_000,
                "session.timeout.ms": SESSION_SECONDS * 1000,
                "heartbeat.interval.ms": SESSION_SECONDS * 1000 // 3,
                "max.poll.interval.ms": POLL_INTERVAL_SECONDS * 1000,
                "enable.partition.eof": True,
                "error_cb": self._note_fault,
            }
        )
        self.thread = ClientThread("notify-kafka")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the client's thread. A KafkaException is raised as a NotifyError, see refusals.py."""
        try:
            return await self.thread.call(function, *arguments)
        except KafkaException as raised:
            raise refusal(self._fault or error_of(raised), self._cluster, self._group) from raised

    async def call_patiently(self, function: Callable[..., T], *arguments: Any) -> T:
        """Like `call`, but repeated while it raises Unavailable, for example because a new topic has no leader yet."""
        backoff, deadline = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS), time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await self.call(function, *arguments)
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                log.debug("Kafka is asked again: %s", error)
            await asyncio.sleep(backoff.next())

    def fetch(self, opening: Coroutine[Any, Any, Mapping[Place, int]]) -> None:
        """Open partitions (`opening` returns their offsets) and fetch them, in one call in the feed's thread, because a
        reset moves only partitions that are both open and fetched."""
        fetched = [TopicPartition(*place, offset) for place, offset in self.thread.wait_for(opening).items()]
        self.consumer.incremental_assign(fetched)
        self.consumer.resume(fetched)  # a partition may have been paused when it was given up

    def look(self) -> None:
        """Ask the brokers for their topics, as the first call.

        Raises Unauthorized if they refuse the login or certificate, Unavailable if they do not answer.
        """
        known_topics(self._cluster, ANSWER_SECONDS)
        self._fault = None

    async def poll(self, most: int, seconds: float) -> int:
        """Fetch records into their windows; returns their number. Rebalances happen within this call."""
        fetched, ends = await self.call(self._poll, most, seconds)
        replacements: dict[Window, Window] = {}
        changed: dict[Window, None] = {}
        for polled, items in fetched:
            window = replacements.get(polled, polled)
            if items[0].offset < window.next and not window.is_closed:
                replacements[polled] = window = self._partitions.begin_anew(window, items[0].offset)
            self._partitions.add(window, items)
            epoch = items[-1].record.leader_epoch()
            window.last = None if epoch is None else (items[-1].offset, epoch)
            changed[window] = None
        for window in changed:
            self._partitions.look(window)
        for place, polled, offset in ends:
            self._partitions.reach(place, replacements.get(polled, polled), offset)
        return sum([len(items) for _, items in fetched])

    def _poll(self, most: int, seconds: float) -> tuple[list[Fetched], list[End]]:
        """Records with their windows, and the ends of partitions that were read to their end."""
        fetched: list[Fetched] = []
        ends: list[End] = []
        room = POLLED_BYTES
        while True:
            # Look up windows in this thread, because a window that opens later belongs to another fetch.
            windows = dict(self._partitions.items())
            asked = max(1, min(most, room // self._record_bytes))
            polled = self.consumer.consume(asked, 0)
            if windows != (now := dict(self._partitions.items())):
                polled = self._fetch_again(polled, windows, now)
            if not polled and seconds:
                # The call for many records would wait until all have come.
                polled, seconds, asked = [r for r in (self.consumer.poll(seconds),) if r is not None], 0.0, 1
                windows = dict(self._partitions.items())
            size = self._sort(polled, windows, fetched, ends)
            if polled:
                self._record_bytes = max(1, self._record_bytes // 2, size // len(polled))
            most, room = most - len(polled), room - size
            if len(polled) < asked or most <= 0 or room <= 0:
                return fetched, ends

    def _sort(self, polled: list[Any], windows: Mapping[Place, Window], fetched: list[Fetched], ends: list[End]) -> int:
        """Add what was polled to `fetched` and `ends`; returns the bytes of the records."""
        total = 0
        last: Place | None = None
        next_offset = 0
        items: list[Item] | None = None
        make: Callable[[int, bytes | None, int, Any], Item] = Item
        for record in polled:
            place = record.topic(), record.partition()
            error = record.error()
            if error is not None:
                window = windows.get(place)
                if error.code() == KafkaError._PARTITION_EOF and window is not None:
                    ends.append((place, window, record.offset() or 0))
                else:
                    self._take_error(error)
                continue
            offset = record.offset()
            if place != last or offset < next_offset:
                last, items = place, None
                make = _retried if place[0].startswith(RETRY) else Item
                if (window := windows.get(place)) is not None:
                    items = []
                    fetched.append((window, items))
            next_offset = offset + 1
            if items is not None:
                key = record.key()
                size = len(record) + (len(key) if key else 0) + ITEM_BYTES
                total += size
                items.append(make(offset, key, size, record))
        return total

    def _fetch_again(self, polled: list[Any], before: Mapping[Place, Window], now: Mapping[Place, Window]) -> list[Any]:
        """Leave out of what one call brought the records of partitions that a rebalance opened within it.

        Some may have been fetched for an earlier window, and leave out what that window did not finish. So all are
        fetched again.
        """
        opened = {place for place, window in now.items() if before.get(place) is not window}
        kept = [record for record in polled if (record.topic(), record.partition()) not in opened]
        if len(kept) < len(polled):
            again = [TopicPartition(*place, now[place].next) for place in opened]
            self.consumer.incremental_unassign(again)
            self.consumer.incremental_assign(again)
            self.consumer.resume(again)
        return kept

    def _take_error(self, error: KafkaError) -> None:
        if is_final(error) or not (error.retriable() or error.code() in CLIENT_RECOVERS):
            raise KafkaException(error)
        log.debug("Kafka: %s", error.str())

    def _note_fault(self, error: KafkaError) -> None:
        if refuses(error):
            self._fault = error
        log.debug("Kafka: %s", error.str())

    async def look_at_ends(self) -> None:
        """Log partitions that give no records although they have some: an open transaction hides all that follow it
        from readers of committed records. The client takes its first record for the partition's end."""
        now = time.monotonic()
        hiding = {}
        for place in await self.call(self._hidden):
            window = self._partitions.get(place)
            if window is not None:
                offset, since = self._hiding.get(place, (window.next, now))
                hiding[place] = (offset, since) if offset == window.next else (window.next, now)
        self._hiding = hiding
        self._told_hidden &= hiding.keys()
        for place, (offset, since) in hiding.items():
            if now - since > HIDDEN_SECONDS and place not in self._told_hidden:
                self._told_hidden.add(place)
                log.error(
                    "topic %s gives nothing from offset %d on in partition %d, for %.0f s, although it has more: "
                    "a producer's open transaction hides them. kafka-transactions.sh find-hanging names it, and abort "
                    "ends it", place[0], offset, place[1], now - since,
                )  # fmt: skip

    def _hidden(self) -> list[Place]:
        """The partitions that were read to their end and have records behind it, by the brokers' last answers."""
        hidden = []
        for place, window in self._partitions.items():
            if window.is_at_end and place not in self._partitions.paused:
                with contextlib.suppress(KafkaException):  # the partition may have gone
                    bounds = self.consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
                    if bounds is not None and bounds[1] > window.next:
                        hidden.append(place)
        return hidden

    async def pause(self, places: Iterable[Place]) -> None:
        """Stop fetching these partitions, if they still have to be paused when the call is made.

        A reset may have moved a partition meanwhile. It is fetched again, and once paused, nobody would resume it.
        """

        def pause(partitions: list[TopicPartition]) -> None:
            still_paused = [p for p in partitions if (p.topic, p.partition) in self._partitions.paused]
            if still_paused:
                self.consumer.pause(still_paused)

        await self._change(pause, places)

    async def resume(self, places: Iterable[Place]) -> None:
        await self._change(self.consumer.resume, places)

    async def _change(self, function: Callable[[list[TopicPartition]], None], places: Iterable[Place]) -> None:
        def change(changed: list[Place]) -> None:
            for place in changed:
                try:
                    function([TopicPartition(*place)])
                except KafkaException as raised:  # the partition may belong to another instance by now
                    log.debug("Kafka: %s", error_of(raised).str())

        await self.call(change, list(places))

    async def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Leave the group, after the current call. Waits at most `seconds` for both."""
        await self.thread.end(partial(leave, self._group, self.consumer.close, LEAVE_SECONDS), seconds)


def _retried(offset: int, key: bytes | None, size: int, record: Any) -> Item:
    """An item of a retry topic."""
    headers = records.listed(record)
    attempt, due_us = records.number(headers, records.ATTEMPT), records.number(headers, records.DUE)
    return Item(offset, key, size, record, attempt or 1, due_us or 0)


class PollSize:
    """Decides how many records one poll asks for: few for slow handlers, many for quick ones.

    A poll goes to the client's thread and back, which takes some milliseconds on a busy machine. If each poll brought
    few records, this would limit quick handlers. But if a slow handler has many records waiting, they delay records of
    other partitions that come after them. The size doubles while whole lots are handled quickly; otherwise it is
    halved, down to the consumer's `batch`.
    """

    def __init__(self, batch: int) -> None:
        self._least = batch
        self._size = batch
        self._came, self._came_at = 0, 0.0

    def came(self, now: float, count: int) -> None:
        """Note that a poll has brought `count` records. `now`: seconds of a monotonic clock."""
        self._came, self._came_at = count, now

    def next(self, now: float) -> int:
        """How many records the next poll asks for. The time of the poll itself does not count as handling."""
        was_quick = self._came >= self._size and now - self._came_at < QUICK_SECONDS
        size = min(max(2 * self._size, 2), MOST_POLLED) if was_quick else self._size // 2
        self._size = max(size, self._least)
        return self._size

    @property
    def low(self) -> int:
        """The number of ready items, at least 1, below which more are fetched, although others may wait behind them."""
        return min(self._least, MOST_LOW) // 2 + 1

    @property
    def half(self) -> int:
        """The number of items that are not done below which more are fetched, so that they come while the last half of
        a lot is handled; 0 for slow handlers."""
        return self._size // 2 if self._size > self._least else 0
