"""One consumer group: its subscriptions, and the messages that it leases to its instances."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from notify.errors import Conflict, NotifyError
from notify.protocol.limits import OWNED
from notify.protocol.wire import SettledItem, SettleItem
from notify.server.delivery.ack_memory import AckMemory
from notify.server.delivery.answers import Answers
from notify.server.delivery.cursor import Cursor, is_full
from notify.server.delivery.fair import FairCursor, FairOrderedCursor
from notify.server.delivery.holds import Holds
from notify.server.delivery.instances import Instance, Instances, Readers
from notify.server.delivery.leases import Handed, Leases
from notify.server.delivery.ordered import OrderedCursor
from notify.server.delivery.owners import Owner, Owners
from notify.server.delivery.pace import BEHIND, BUSY_LIMIT, Pace
from notify.server.delivery.receipts import lease_of
from notify.server.delivery.retries import Retries
from notify.server.delivery.settling import Settling, trace_of
from notify.server.delivery.turns import Turns
from notify.server.metrics import Metrics
from notify.server.rate import TokenBucket
from notify.storage.groups import Subscription
from notify.storage.message_run import CommitTimes, MessageRun
from notify.storage.names import retry_topic
from notify.storage.queues import Store
from notify.storage.records import StoredMessage


@dataclass(slots=True)
class Demand:
    """A request to receive, for the duration of one call of `Group.receive`."""

    instance: Instance
    topics: frozenset[str] | None
    """None: every topic of the group."""
    limit: int
    """The most messages of all topics together."""
    lease_us: int
    now_us: int
    may: Callable[[str], bool] | None
    """Whether the consumer has the right to receive a topic now; None: it may receive every topic."""
    is_beside_others: bool
    """Other instances of the group are active: they get what this one does not."""
    in_runs: bool = False
    """Whether it takes runs."""
    _rooms: dict[str, int] = field(default_factory=dict)
    """By topic for which the instance has a bound: how many messages the request may still get."""

    def wants(self, cursor: Cursor) -> bool:
        """Whether the request asks for the cursor's topic, and may get more messages of it."""
        topic = cursor.serves
        return (
            (self.topics is None or topic in self.topics)
            and (self.may is None or self.may(topic))
            and self.room_of(topic) > 0
        )

    def room_of(self, topic: str) -> int:
        """How many messages of a topic the request may still get."""
        if not (self.is_beside_others and topic in self.instance.bounds):
            return self.limit
        if topic not in self._rooms:
            self._rooms[topic] = self.instance.room_of(topic, self.limit)
        return self._rooms[topic]

    def handed(self, topic: str, count: int) -> None:
        """Count messages of a topic that were handed out for this request."""
        if topic in self._rooms:
            self._rooms[topic] -= count
        self.instance.handed(topic, count, self.now_us)


class Group:
    """A consumer group. A subscription's mode says which instance gets a message, and in which order."""

    def __init__(
        self,
        name: str,
        store: Store,
        metrics: Metrics,
        lease_ids: Iterator[int],
        pace: Pace,
        recent: AckMemory,
        holders: dict[int, str] | None = None,
    ) -> None:
        """`lease_ids` yields the id of each new lease; `recent` is shared by all groups; `holders`: see Leases."""
        self.name = name
        self._store = store
        self._metrics = metrics
        self._to_consumer = metrics.latencies["commit_to_consumer"].of(name.partition("@")[0])
        self._pace = pace
        self._paced_until_us = 0
        self.paused = False
        self.has_broadcast = False
        self.cursors: dict[tuple[str, int], Cursor] = {}
        """The cursor in each queue, by (topic, queue)."""
        self.turns = Turns(store.priorities(name.partition("@")[0]))
        self.rate: TokenBucket | None = None
        """The bound on its messages a second; None: no bound."""
        self.scheduled_us: int | None = None
        """When `expire` is scheduled next."""
        self.has_skipped = False
        """The last receive stopped after it skipped many messages: more that match may follow."""
        self.wait_seconds = 0.0
        """How long to wait if `has_skipped` because the filters' share of the server's time is used up."""
        self.is_to_be_served = False
        """A call that serves its waiting polls again is scheduled, because it has skipped messages."""
        self.instances = Instances()
        self.readers = Readers()
        self._held = Leases(name, lease_ids, holders)
        self._owners = Owners()
        self._retries = Retries()
        self._growth = Growth(store, self.cursors, self.turns)
        self._settling = Settling(name, store, metrics, self._held, self._owners, self.turns, self._retries, recent)
        self.holds = Holds(store, self.cursors, self._settling)
        self.leases = self._held.by_id
        self.answers = Answers(store, self.instances, self._held, self._owners, self._settling)

    # --- subscriptions ----------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription, queues: int, moved: bool) -> None:
        """Follow a topic; with `moved` continue at its progress in the storage, and drop leases and retries."""
        for queue in range(queues):
            key = (subscription.topic, queue)
            cursor = self.cursors.get(key)
            if cursor is None or moved or cursor.subscription.way != subscription.way:
                # The new cursor begins at the first message that is not settled: leased messages are delivered again.
                self._held.drop(subscription.topic, queue)
                if cursor is not None:
                    self._forget(cursor)
                cursor = self.cursors[key] = _kind(subscription)(self._store, subscription, queue, self._metrics)
                for due_us, _ in cursor.retries:
                    self._retries.add(cursor, due_us)
            else:
                cursor.change(subscription)
            if subscription.mode != "broadcast":
                self.turns.wake(cursor)
        if subscription.mode not in OWNED:
            self._owners.forget(subscription.topic)
        self.has_broadcast |= subscription.mode == "broadcast"
        self._growth.forget(subscription.topic)
        if subscription.mode != "broadcast":
            self._growth.follow(subscription.topic)
            self._growth.look()

    def _forget(self, cursor: Cursor) -> None:
        """Remove a cursor of the group."""
        self.turns.drop(cursor)
        del self.cursors[(cursor.topic, cursor.queue)]
        self.readers.forget(cursor.topic)
        if self.has_broadcast:
            self.has_broadcast = "broadcast" in self.modes().values()

    def modes(self) -> dict[str, str]:
        """The mode of each topic."""
        return {topic: cursor.subscription.mode for (topic, _), cursor in self.cursors.items()}

    def wake(self, topic: str) -> None:
        """Wake the cursors of a topic, which has new messages."""
        queue = 0
        while (cursor := self.cursors.get((topic, queue))) is not None:
            if not cursor.is_awake and cursor.subscription.mode != "broadcast":
                self.turns.wake(cursor)
            queue += 1

    def dropped(self, topic: str) -> None:
        """Continue with the keys that were held by messages which were dropped from a topic's queues."""
        for cursor in list(self.cursors.values()):
            if cursor.topic == topic and isinstance(cursor, OrderedCursor) and cursor.let_go_dropped():
                self.turns.wake(cursor)

    def unsubscribe(self, topic: str) -> None:
        served = topic
        for key in [key for key in self.cursors if key[0] == topic]:
            served = self.cursors[key].serves
            self._held.drop(*key)
            self._forget(self.cursors[key])
        # Redriven messages of the topic come from a retry topic, which the group may still follow.
        if {(served, 0), (retry_topic(self.name, served), 0)}.isdisjoint(self.cursors):
            self.turns.forget(served)
        self._owners.forget(topic)
        self._growth.forget(topic)

    # --- handing out ------------------------------------------------------------------------------------------

    def receive(
        self,
        name: str,
        topics: frozenset[str] | None,
        limit: int,
        lease_us: int,
        now_us: int,
        may: Callable[[str], bool] | None = None,
        *,
        in_runs: bool = False,
    ) -> list[Handed]:
        """Lease up to `limit` messages to the instance `name`; classes and turns say from which topics.

        `may` tells whether the consumer may receive a topic: a right can have ended while the poll waited. `in_runs`:
        whether what is handed out may be runs.
        """
        self.has_skipped = False
        self.wait_seconds = 0.0
        instance = self.instances.asking(name, now_us)
        asked = topics if topics is None else [topic for topic in topics if (topic, 0) in self.cursors]
        self.readers.note(instance, asked, now_us, may)
        handed: list[Handed] = []
        if self.paused or now_us < self._paced_until_us:
            return handed
        is_beside_others = len(self.instances) > 1 and self.instances.others_ask(instance, now_us)
        if is_beside_others:
            limit = instance.room(limit)
        if self.rate is not None:
            limit = min(limit, self.rate.available(now_us))
        self._pace.look(now_us)
        if self._growth.before:
            self._growth.look()
        try:
            self._hand_out(handed, Demand(instance, topics, limit, lease_us, now_us, may, is_beside_others, in_runs))
        except NotifyError:
            if not handed:  # what is leased already must reach its consumer
                raise
        if self.rate is not None:
            self.rate.take(sum([h.count for h in handed]), now_us)
        return handed

    def _hand_out(self, handed: list[Handed], asked: Demand) -> None:
        """Add leases to `handed`, queue by queue, up to the number of messages that the request asks for."""
        size = count = 0
        limit, now_us = asked.limit, asked.now_us
        put_aside: list[Cursor] = []
        turns = self.turns
        is_busy = self._pace.is_busy
        started = 0.0
        try:
            while count < limit and not is_full(size, count):
                cursor = turns.next()
                if cursor is None:
                    # The message just passed may be the last one from before a growth of the topic.
                    if self._growth.before and self._growth.look():
                        continue
                    break
                if (
                    not asked.wants(cursor)
                    or (cursor.subscription.mode in OWNED and not self._owns(asked, cursor.topic))
                    or (cursor.evaluates and self._must_wait())
                ):
                    turns.put_aside(cursor)
                    put_aside.append(cursor)
                    continue
                if is_busy and not started and cursor.is_behind(BEHIND // turns.awake()):
                    started = time.perf_counter()
                    limit = min(limit, BUSY_LIMIT)
                most = min(turns.left(cursor, limit - count, limit), asked.room_of(cursor.serves))
                run = cursor.take_run(most, now_us) if asked.in_runs else None
                if run is not None:
                    turns.served(cursor, run.count, most)
                    handed.append(self._lease(cursor, [], run.offsets, asked, run))
                    count += run.count
                    size += run.size
                    continue
                taken = self._take_evaluating(cursor, most, now_us) if cursor.evaluates else cursor.take(most, now_us)
                turns.served(cursor, len(taken), most)
                if taken:
                    handed.append(self._lease(cursor, taken, [m.offset for m in taken], asked))
                    count += len(taken)
                    size += sum([len(m.payload) for m in taken])
                elif cursor.is_awake:
                    self.has_skipped = True
                    break
                if cursor.evaluates:
                    break  # one turn of evaluations is used up, or nearly so
        finally:
            turns.put_back(put_aside)
            if started:
                self._paced_until_us = now_us + self._pace.pause_us(time.perf_counter() - started)

    def _must_wait(self) -> bool:
        """Whether the filters' share of the server's time is used up; sets `wait_seconds`."""
        self.wait_seconds = self._pace.evaluation_wait()
        self.has_skipped = self.has_skipped or self.wait_seconds > 0
        return self.wait_seconds > 0

    def _take_evaluating(self, cursor: Cursor, limit: int, now_us: int) -> list[StoredMessage]:
        """Messages of one queue that match its filter. The CPU time of the evaluation is counted."""
        started = time.thread_time()  # CPU time: waiting for a core costs nothing
        taken = cursor.take(limit, now_us)
        self._pace.evaluated(time.thread_time() - started)
        return taken

    def refuse_second(
        self,
        instance: str,
        topics: frozenset[str] | None,
        now_us: int,
        may: Callable[[str], bool] | None = None,
    ) -> None:
        """Raises Conflict if another instance owns an exclusive topic, where a standby is a mistake.

        `may`: whether the consumer may consume a topic; other topics are not checked.
        """
        for topic, owner in self._owners.by_topic.items():
            if owner.instance == instance or owner.until_us <= now_us or (topics is not None and topic not in topics):
                continue
            cursor = self.cursors[(topic, 0)]
            if may is not None and not may(cursor.serves):
                continue
            if cursor.subscription.mode == "exclusive":
                raise Conflict(
                    f"topic {topic!r} is exclusive in group {self.name!r}, and instance {owner.instance!r} has it; "
                    "use the mode failover for a standby",
                    "topic_is_taken",
                )

    def own_exclusively(self, instance: str, topics: Iterable[str], until_us: int) -> None:
        """Note that the instance alone receives these topics: this is the group of an instance."""
        for topic in topics:
            self._owners.keep(topic, instance, until_us)

    def refuse_namesake(
        self,
        instance: str,
        session: str,
        topics: frozenset[str] | None,
        now_us: int,
        may: Callable[[str], bool] | None = None,
    ) -> bool:
        """Have the newest of the consumers with an instance's name receive what the instance alone receives.

        Two of them would each get a part of the messages, at the same time, and nobody would know. Returns whether
        `session`, the one that asks, is a new one behind another one, whose messages are available again. Raises
        Conflict if a later one has asked. `may`: as for `refuse_second`.
        """
        is_replacing = False
        for topic, owner in self._owners.by_topic.items():
            if owner.instance != instance or (topics is not None and topic not in topics):
                continue
            if may is not None and not may(self.cursors[(topic, 0)].serves):
                continue
            is_behind = owner.take(session)
            if is_behind is None:
                raise Conflict(
                    f"another consumer with the name {instance!r} has come, and receives topic {topic!r} of group "
                    f"{self.name.partition('@')[0]!r} alone: give each running consumer an instance= of its own",
                    "topic_is_taken",
                )
            if is_behind:
                is_replacing = True
                # A consumer that is stopping finishes what it holds.
                held = [(lease, place) for lease, place in self._held.open_of(topic) if not lease.is_interrupted]
                self._settling.come_back(held, now_us)
        return is_replacing

    def _owns(self, asked: Demand, topic: str) -> bool:
        """Whether the instance owns the topic; it becomes the owner if there is none any more."""
        instance, now_us = asked.instance, asked.now_us
        owner = self._owners.by_topic.get(topic)
        if owner is not None and owner.instance != instance.name:
            if owner.until_us > now_us:
                return False
            # The last owner's leases end as expired: its messages are available again, in order.
            self._settling.come_back(self._held.open_of(topic), now_us)
            self._owners.forget(topic)
        self._owners.keep(topic, instance.name, now_us + asked.lease_us)
        return True

    def _lease(
        self,
        cursor: Cursor,
        taken: list[StoredMessage],
        offsets: Sequence[int],
        asked: Demand,
        run: MessageRun | None = None,
    ) -> Handed:
        count, now_us = len(offsets), asked.now_us
        times = CommitTimes(array("Q", [m.committed_us for m in taken])) if run is None else run.times
        lease = self._held.add(cursor, offsets, times, now_us, asked.lease_us, asked.instance)
        asked.handed(cursor.serves, count)
        token = f"{lease.id:x}."
        self._metrics.delivered += count
        before, replay = cursor.progress.attempts, cursor.subscription.replay
        if not before or (run is not None and not any(offset in run.offsets for offset in before)):
            self._to_consumer.add_ages(now_us, *times.of(range(count)))
            self._exemplify(taken[:1], now_us)
            return Handed(token, taken, None, replay, run)
        attempts = [before.get(offset, 0) + 1 for offset in offsets]
        self._metrics.redelivered += sum([attempt > 1 for attempt in attempts])
        for time_us, attempt in zip(times.each, attempts, strict=True):
            if attempt == 1:  # a later one would count the time of the earlier ones, too
                self._to_consumer.add(now_us - time_us)
        self._exemplify([m for m, attempt in zip(taken, attempts, strict=False) if attempt == 1][:1], now_us)
        return Handed(token, taken, attempts, replay, run)

    def _exemplify(self, messages: Iterable[StoredMessage], now_us: int) -> None:
        """Note the traces of messages that were handed out, if they are wanted. A server that traces hands out no runs,
        so it has the messages."""
        if self._to_consumer.exemplars is not None:
            for message in messages:
                self._to_consumer.exemplify(now_us - message.committed_us, now_us, partial(trace_of, message))

    def give_back(self, handed: list[Handed], now_us: int) -> None:
        """Return messages that were not sent to their consumer: they are available now, and no attempt counts."""
        for handed_lease in handed:
            lease_id = lease_of(handed_lease.token)
            lease = None if lease_id is None else self.leases.get(lease_id)
            if lease is not None:
                self.answers.forget(lease)
                self._settling.give_back(lease, now_us)

    def leave(self, name: str, may: Callable[[str], bool] | None = None) -> None:
        """An instance stops: end its ownership of topics, except of topics of which it still holds messages, and note
        what it holds as interrupted.

        `may`: whether the consumer may consume a topic.
        """
        for lease in self.leases.values():
            if lease.instance.name == name and (may is None or may(lease.cursor.serves)):
                lease.is_interrupted = True
        for topic, owner in list(self._owners.by_topic.items()):
            if owner.instance != name or (may is not None and not may(self.cursors[(topic, 0)].serves)):
                continue
            if all(lease.instance.name != name for lease, _ in self._held.open_of(topic)):
                self._owners.forget(topic)

    async def settle(
        self, items: list[SettleItem], now_us: int, may: Callable[[str], bool] | None = None
    ) -> list[SettledItem]:
        """Settle, retry or renew leased messages as a consumer asks; see Settling."""
        return await self._settling.settle(items, now_us, may)

    # --- time -------------------------------------------------------------------------------------------------

    def extend_leases(self, us: int) -> None:
        """Extend leases and ownerships of topics by `us` microseconds."""
        self._held.extend(us)
        for _, owner in self._owners.by_topic.items():
            owner.until_us += us

    def next_event_us(self, now_us: int) -> int | None:
        """When the next lease or ownership expires, retry comes due, or the rate or pace allows more; None: never."""
        event_times: list[int] = []
        if self._owners.by_topic:
            event_times += [owner.until_us for owner in self._owners.by_topic.values() if owner.until_us > now_us]
        lease_us, retry_us = self._held.next_us(), self._retries.next_us()
        if lease_us is not None:
            event_times.append(lease_us)
        if retry_us is not None:
            event_times.append(retry_us)
        if self._paced_until_us > now_us:
            event_times.append(self._paced_until_us)
        if self.rate is not None and not self.rate.available(now_us):
            event_times.append(self.rate.refilled_us(now_us))
        return min(event_times, default=None)

    def expire(self, now_us: int) -> None:
        """End expired leases: their messages are available again now, or become dead letters after the last attempt.

        Raises the storage's error; those leases stay, and are looked at again after LOOK_AGAIN_US.
        """
        for cursor in self._retries.take_due(now_us):
            if self.cursors.get((cursor.topic, cursor.queue)) is cursor:
                self.turns.wake(cursor)
        leases = self._held.run_out(now_us)
        expired = [(lease, place) for lease in leases for place in sorted(lease.open)
                if lease.extended.get(place, 0) <= now_us]  # fmt: skip
        try:
            self._settling.come_back(expired, now_us)
        finally:
            self._held.look_again(leases, now_us)

    def is_paced(self, now_us: int) -> bool:
        """Whether the group is paused for a moment because it catches up while producers are busy."""
        return self._paced_until_us > now_us

    def owners(self) -> Iterable[tuple[str, Owner]]:
        """The topics that one instance owns, each with its owner."""
        return self._owners.by_topic.items()

    def lag(self) -> int:
        """Messages that the group has not settled yet, in all its queues."""
        return sum(cursor.lag() for cursor in self.cursors.values())

    def in_flight(self) -> int:
        """How many messages are leased."""
        return self._held.in_flight()


def _kind(subscription: Subscription) -> type[Cursor]:
    """The kind of cursor that a subscription needs."""
    if subscription.fair_by:
        return FairOrderedCursor if subscription.mode == "ordered" else FairCursor
    return OrderedCursor if subscription.mode == "ordered" else Cursor


class Growth:
    """The growths of topics that a group has not passed yet."""

    __slots__ = ("_cursors", "_store", "_turns", "before")

    def __init__(self, store: Store, cursors: dict[tuple[str, int], Cursor], turns: Turns) -> None:
        """`cursors`: the group's cursors by (topic, queue); `turns`: their turns."""
        self._store = store
        self._cursors = cursors
        self._turns = turns
        self.before: dict[str, int] = {}
        """By topic that has grown: the number of the first growth that its queues have not passed yet."""

    def follow(self, topic: str) -> None:
        """Check all growths of a topic from the next `look` on."""
        self.before[topic] = 0

    def forget(self, topic: str) -> None:
        """Stop waiting for a topic's growths."""
        self.before.pop(topic, None)

    def look(self) -> bool:
        """Let the queues of a topic that grew continue when all have passed that growth; whether any continues."""
        any_continues = False
        for name, first_number in list(self.before.items()):
            topic = self._store.topic(name)
            if topic is None:
                del self.before[name]
                continue
            cursors = [self._cursors[(name, queue)] for queue in range(topic.queues)]
            number = first_number
            while number < len(topic.grown) and all(
                cursor.is_through(end) for cursor, end in zip(cursors, topic.grown[number], strict=False)
            ):
                number += 1
            untils: Iterable[int | None]
            if number < len(topic.grown):
                self.before[name] = number
                untils = itertools.chain(topic.grown[number], itertools.repeat(0))  # newer queues wait from offset 0
            else:
                del self.before[name]
                untils = itertools.repeat(None)
            for cursor, end in zip(cursors, untils, strict=False):
                cursor.until = end
                if number != first_number or end is None:
                    self._turns.wake(cursor)
                    any_continues = True
        return any_continues
