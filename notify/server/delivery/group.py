"""One consumer group: its cursors, its leases, and what becomes of a message that is settled or not settled."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from notify.errors import Conflict, InvalidRequest, NotifyError, StaleReceipt
from notify.limits import LIMITS, check_between
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import ACTIVE_US, Instance
from notify.server.delivery.ordered import OrderedCursor
from notify.server.delivery.pace import BEHIND, BUSY_LIMIT, Pace
from notify.server.delivery.rate import TokenBucket
from notify.server.delivery.turns import Turns
from notify.server.metrics import Metrics
from notify.wire import Payload, SettledItem, SettleItem, decode_payload, encode_msgpack
from storage.progress import to_runs
from storage.store import SettleKind, Store, StoredMessage, Subscription

READ_BYTES = 8 << 20
MOST_INSTANCES = 10_000
"""Names of consumers that are remembered although they do not ask any more."""


class Lease:
    """A batch handed to one instance: one token, settled message by message or all at once."""

    __slots__ = ("cursor", "deadline_us", "extended", "id", "instance", "length_us", "offsets", "open")

    def __init__(
        self, lease_id: int, cursor: Cursor, offsets: list[int], now_us: int, length_us: int, instance: Instance
    ) -> None:
        self.id = lease_id
        self.cursor = cursor
        self.offsets = offsets
        self.open = set(range(len(offsets)))
        self.length_us = length_us
        self.deadline_us = now_us + length_us
        self.extended: dict[int, int] = {}
        self.instance = instance


@dataclass(slots=True)
class Handed:
    """Messages of one lease on their way to a consumer."""

    token: str
    messages: list[StoredMessage]
    attempts: list[int] | None
    """Which attempt each one is, from 1; None where all are the first."""

    def each(self) -> Iterator[tuple[str, StoredMessage, int]]:
        """Receipt, message and attempt, one by one."""
        for i, message in enumerate(self.messages):
            yield f"{self.token}{i}", message, 1 if self.attempts is None else self.attempts[i]


@dataclass(slots=True)
class Owner:
    """The instance that alone receives a topic, until it has asked for nothing, and settled nothing, for its lease."""

    instance: str
    until_us: int


OWNED = ("exclusive", "failover")
"""Modes in which one instance has the topic to itself."""


class Group:
    """A consumer group: by its subscriptions' modes, any instance and many messages in flight, or in an order."""

    def __init__(self, name: str, store: Store, metrics: Metrics, lease_ids: Iterator[int], pace: Pace) -> None:
        self.name = name
        self._pace = pace
        self._paced_until_us = 0
        self.paused = False
        self.has_broadcast = False
        self.cursors: dict[tuple[str, int], Cursor] = {}
        self.turns = Turns(store.priorities(name))
        self.rate: TokenBucket | None = None
        """How many messages it is given in a second."""
        self.has_skipped = False
        """The last receive stopped among messages that the group does not want: there may be some behind them."""
        self.leases: dict[int, Lease] = {}
        self.owners: dict[str, Owner] = {}
        """Who has a topic to itself, in the modes exclusive and failover."""
        self.instances: dict[str, Instance] = {}
        self._store = store
        self._metrics = metrics
        self._lease_ids = lease_ids
        self._deadlines: list[tuple[int, int]] = []
        self._due: list[tuple[int, int, Cursor]] = []
        """Heap of when a queue has a retry that comes due."""
        self._numbers = itertools.count()
        self._worn_out: list[tuple[Cursor, int, str]] = []
        """What has had all its attempts, and why it is dead: to be moved to the dead-letter queue."""

    # --- subscriptions ----------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription, queues: int, moved: bool) -> None:
        """Follow a topic; with `moved` from where its progress now stands, dropping leases and retries."""
        for queue in range(queues):
            key = (subscription.topic, queue)
            cursor = self.cursors.get(key)
            if cursor is None or moved or cursor.subscription.mode != subscription.mode:
                # From the first message that is not settled; what was leased is delivered again.
                self.drop_leases(subscription.topic, queue)
                if cursor is not None:
                    self._forget(cursor)
                kind = OrderedCursor if subscription.mode == "ordered" else Cursor
                cursor = self.cursors[key] = kind(self._store, subscription, queue, self._metrics)
                for due_us, _ in cursor.retries:
                    self._wake_at(cursor, due_us)
            else:
                cursor.change(subscription)
            if subscription.mode != "broadcast":
                self.turns.wake(cursor)
        if subscription.mode not in OWNED:
            self.owners.pop(subscription.topic, None)
        self.has_broadcast |= subscription.mode == "broadcast"

    def _forget(self, cursor: Cursor) -> None:
        """Another cursor takes its place, or none."""
        self.turns.drop(cursor)
        del self.cursors[(cursor.topic, cursor.queue)]
        if self.has_broadcast:
            self.has_broadcast = "broadcast" in self.modes().values()

    def modes(self) -> dict[str, str]:
        """The mode of each topic."""
        return {topic: cursor.subscription.mode for (topic, _), cursor in self.cursors.items()}

    def wake(self, topic: str) -> None:
        """There are more messages in a topic."""
        queue = 0
        while (cursor := self.cursors.get((topic, queue))) is not None:
            if not cursor.is_awake and cursor.subscription.mode != "broadcast":
                self.turns.wake(cursor)
            queue += 1

    def _wake_at(self, cursor: Cursor, due_us: int) -> None:
        heapq.heappush(self._due, (due_us, next(self._numbers), cursor))

    def holds(self, receipt: str) -> bool:
        """Whether the receipt is of a lease of this group."""
        token = receipt.partition(".")[0]
        try:
            return int(token, 16) in self.leases
        except ValueError:
            return False

    def unsubscribe(self, topic: str) -> None:
        for key in [key for key in self.cursors if key[0] == topic]:
            self.drop_leases(*key)
            self._forget(self.cursors[key])
        self.turns.forget(topic)
        self.owners.pop(topic, None)

    def drop_leases(self, topic: str, queue: int) -> None:
        """Receipts of this queue become stale."""
        stale = [
            lease.id for lease in self.leases.values() if lease.cursor.topic == topic and lease.cursor.queue == queue
        ]
        for lease_id in stale:
            self._drop_lease(self.leases[lease_id])

    def _drop_lease(self, lease: Lease) -> None:
        del self.leases[lease.id]
        lease.instance.drop(len(lease.open))

    # --- handing out ------------------------------------------------------------------------------------------

    def receive(self, name: str, topics: frozenset[str] | None, limit: int, lease_us: int, now_us: int) -> list[Handed]:
        """Up to `limit` messages under leases, by the topics' classes and in turn."""
        self.has_skipped = False
        instance = self._asks(name, now_us)
        handed: list[Handed] = []
        if self.paused or now_us < self._paced_until_us:
            return handed
        limit = instance.room(limit, self._is_alone(instance, now_us))
        if self.rate is not None:
            limit = min(limit, self.rate.available(now_us))
        size = count = 0
        aside: list[Cursor] = []
        turns = self.turns
        self._pace.look(now_us)
        started = 0.0
        while count < limit and size < READ_BYTES and (cursor := turns.next()) is not None:
            mode = cursor.subscription.mode
            if (topics is not None and cursor.serves not in topics) or (
                mode in OWNED and not self._owns(name, cursor.topic, lease_us, now_us)
            ):
                aside.append(turns.put_aside())
                continue
            if not started and self._pace.is_busy and cursor.is_behind(BEHIND // turns.awake()):
                started = time.perf_counter()
                limit = min(limit, BUSY_LIMIT)
            taken = cursor.take(turns.left(cursor, limit - count), now_us)
            turns.served(cursor, len(taken))
            if taken:
                handed.append(self._lease(cursor, taken, instance, lease_us, now_us))
                count += len(taken)
                size += sum([len(m.payload) for m in taken])
            elif cursor.is_awake:
                self.has_skipped = True
                break
        turns.put_back(aside)
        if started:
            self._paced_until_us = now_us + self._pace.pause_us(time.perf_counter() - started)
        if self.rate is not None:
            self.rate.take(count, now_us)
        return handed

    def _asks(self, name: str, now_us: int) -> Instance:
        instance = self.instances.get(name)
        if instance is None:
            if len(self.instances) >= MOST_INSTANCES:
                self.forget_instances(now_us - ACTIVE_US)
            instance = self.instances[name] = Instance(name, now_us)
        instance.asked_us = now_us
        return instance

    def _is_alone(self, instance: Instance, now_us: int) -> bool:
        """Whether no other instance has asked for something lately."""
        if len(self.instances) == 1:
            return True
        return not any(now_us - i.asked_us < ACTIVE_US for i in self.instances.values() if i is not instance)

    def forget_instances(self, before_us: int) -> None:
        """Consumers that have not asked since then are not listed any more."""
        for name in [name for name, i in self.instances.items() if i.asked_us < before_us and not i.in_flight]:
            del self.instances[name]

    def refuse_second(self, instance: str, topics: frozenset[str] | None, now_us: int) -> None:
        """Raises Conflict if another instance has an exclusive topic: a standby is a mistake there."""
        for topic, owner in self.owners.items():
            if owner.instance == instance or owner.until_us <= now_us or (topics is not None and topic not in topics):
                continue
            if self.cursors[(topic, 0)].subscription.mode == "exclusive":
                refused = Conflict(
                    f"topic {topic!r} is exclusive in group {self.name!r}, and instance {owner.instance!r} has it; "
                    "use the mode failover for a standby"
                )
                refused.code = "topic_is_taken"
                raise refused

    def _owns(self, instance: str, topic: str, lease_us: int, now_us: int) -> bool:
        """Whether the instance has the topic, taking it if nobody has it any more."""
        owner = self.owners.get(topic)
        if owner is not None and owner.instance != instance:
            if owner.until_us > now_us:
                return False
            self._take_back(topic, now_us)
        self.owners[topic] = Owner(instance, now_us + lease_us)
        return True

    def _take_back(self, topic: str, now_us: int) -> None:
        """What the topic's last owner has not settled is available again, in order, at its next attempt."""
        leases = [lease for lease in self.leases.values() if lease.cursor.topic == topic]
        self._come_back([(lease, lease.offsets[index]) for lease in leases for index in sorted(lease.open)], now_us)
        for lease in leases:
            del self.leases[lease.id]

    def _come_back(self, ended: list[tuple[Lease, int]], now_us: int) -> None:
        """Leases of these have ended unsettled: available at once, or dead with the next `expire`."""
        again: dict[Cursor, list[tuple[int, int, int]]] = {}
        self._metrics.leases_expired += len(ended)
        for instance, count in Counter([lease.instance for lease, _ in ended]).items():
            instance.expire(count)
        for lease, offset in ended:
            cursor = lease.cursor
            attempts = cursor.attempts(offset) + 1
            if attempts >= cursor.subscription.max_attempts:
                self._worn_out.append((cursor, offset, f"{attempts} attempts, the last one's lease ran out"))
            else:
                again.setdefault(cursor, []).append((offset, attempts, 0))
                cursor.come_back(offset, now_us)
                self.turns.wake(cursor)
        for cursor, attempts_of in again.items():
            self._store.attempted(self.name, cursor.topic, cursor.queue, attempts_of)

    def _still_there(self, lease: Lease, now_us: int) -> None:
        """An owner that settles keeps its topic for as long as its leases were."""
        owner = self.owners.get(lease.cursor.topic)
        if owner is not None and owner.instance == lease.instance.name:
            owner.until_us = max(owner.until_us, now_us + lease.length_us)

    def _lease(
        self, cursor: Cursor, taken: list[StoredMessage], instance: Instance, lease_us: int, now_us: int
    ) -> Handed:
        lease = Lease(next(self._lease_ids), cursor, [m.offset for m in taken], now_us, lease_us, instance)
        self.leases[lease.id] = lease
        instance.handed(len(taken), now_us)
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.id))
        token = f"{lease.id:x}."
        self._metrics.delivered += len(taken)
        before = cursor.progress.attempts
        if not before:
            return Handed(token, taken, None)
        attempts = [before.get(m.offset, 0) + 1 for m in taken]
        self._metrics.redelivered += sum([attempt > 1 for attempt in attempts])
        return Handed(token, taken, attempts)

    # --- settling ---------------------------------------------------------------------------------------------

    async def settle(self, items: list[SettleItem], now_us: int) -> list[SettledItem]:
        """Carry out what a consumer says of its messages; durable when it returns."""
        answered: list[SettledItem] = []
        acked: dict[Cursor, list[int]] = {}
        retried: dict[Cursor, list[tuple[int, int, int]]] = {}
        dead: list[tuple[Cursor, int, str]] = []
        for item in items:
            try:
                lease, indexes = self._of_receipt(item.receipt)
                self._still_there(lease, now_us)
                if item.action == "ack":
                    acked.setdefault(lease.cursor, []).extend(lease.offsets[indexes.start : indexes.stop])
                    lease.instance.finish(len(indexes), now_us)
                    self._close(lease, indexes)
                else:
                    for index in indexes:
                        self._settle_one(item, lease, index, now_us, retried, dead)
            except NotifyError as error:
                answered.append(SettledItem(item.receipt, error.status, error.code, str(error)))
            else:
                answered.append(SettledItem(item.receipt, 200))
        for cursor, offsets in acked.items():
            self._metrics.acked += len(offsets)
            runs = to_runs(sorted(offsets))
            self._store.settle_soon(self.name, cursor.topic, cursor.queue, runs, SettleKind.ACK)
            cursor.finished(offsets)
            self.turns.wake(cursor)
        for cursor, attempts in retried.items():
            self._store.attempted(self.name, cursor.topic, cursor.queue, attempts)
        if dead:
            await self._dead_letter(dead, now_us)
        await self._store.sync()
        return answered

    def _of_receipt(self, receipt: str) -> tuple[Lease, range]:
        """The messages a receipt names: `lease.index`, or `lease.first-last` for a range.

        Raises StaleReceipt, or InvalidRequest for what is no receipt.
        """
        token, _, index = receipt.partition(".")
        try:
            lease_id = int(token, 16)
            low, dash, high = index.partition("-")
            first = int(low)
            last = int(high) if dash else first
            if not 0 <= first <= last:
                raise ValueError
        except ValueError:
            raise InvalidRequest(f"{receipt[:60]!r} is not a receipt", "invalid_receipt") from None
        lease = self.leases.get(lease_id)
        indexes = range(first, last + 1)
        if lease is None or last >= len(lease.offsets) or not lease.open.issuperset(indexes):
            raise StaleReceipt("the lease is over: the message was settled, or it is with another consumer now")
        return lease, indexes

    def _settle_one(
        self,
        item: SettleItem,
        lease: Lease,
        index: int,
        now_us: int,
        retried: dict[Cursor, list[tuple[int, int, int]]],
        dead: list[tuple[Cursor, int, str]],
    ) -> None:
        cursor, offset = lease.cursor, lease.offsets[index]
        if item.action == "renew":
            seconds = 30.0 if item.lease is None else item.lease
            check_between("lease", seconds, LIMITS.lease_min_seconds, LIMITS.lease_max_seconds)
            lease.extended[index] = now_us + round(seconds * 1_000_000)
            return
        if item.action == "dead_letter":
            dead.append((cursor, offset, item.reason or "refused by the consumer"))
        elif item.action == "retry":
            if item.delay is not None:
                check_between("delay", item.delay, 0, LIMITS.delay_seconds)
            attempts = cursor.attempts(offset) + 1
            if attempts >= cursor.subscription.max_attempts:
                dead.append((cursor, offset, item.reason or f"{attempts} attempts failed"))
            else:
                due_us = now_us + self._back_off_us(cursor, attempts, item.delay)
                retried.setdefault(cursor, []).append((offset, attempts, due_us))
                cursor.come_back(offset, due_us)
                self._wake_at(cursor, due_us)
        else:
            raise InvalidRequest(
                f"action {item.action[:20]!r} is not ack, retry, dead_letter or renew", "invalid_action"
            )
        lease.instance.finish(1, now_us)
        self._close(lease, range(index, index + 1))

    def _back_off_us(self, cursor: Cursor, attempts: int, delay: float | None) -> int:
        if delay is not None:
            return round(delay * 1_000_000)
        s = cursor.subscription
        return min(s.retry_max_us, s.retry_min_us << min(attempts - 1, 40))

    def _close(self, lease: Lease, indexes: range) -> None:
        lease.open.difference_update(indexes)
        if lease.extended:
            for index in indexes:
                lease.extended.pop(index, None)
        if not lease.open:
            self.leases.pop(lease.id, None)

    async def _dead_letter(self, dead: Iterable[tuple[Cursor, int, str]], now_us: int) -> None:
        moved = []
        for cursor, offset, reason in dead:
            found = self._store.read(cursor.topic, cursor.queue, offset, 1, READ_BYTES)
            if found and found[0].offset == offset and not found[0].corrupt:
                moved.append((found[0], self._dead_payload(found[0], cursor.attempts(offset) + 1, reason)))
            else:
                kind = SettleKind.CORRUPT if found and found[0].offset == offset else SettleKind.EXPIRED
                self._store.settle_soon(self.name, cursor.topic, cursor.queue, [(offset, 1)], kind)
        if moved:
            await self._store.dead_letter(self.name, moved, now_us)
            self._metrics.dead_lettered += len(moved)
        for cursor, offset, _ in dead:
            cursor.finished((offset,))
            self.turns.wake(cursor)

    def _dead_payload(self, message: StoredMessage, attempts: int, reason: str) -> bytes:
        """The message with headers that say where it comes from and why it is here."""
        payload = decode_payload(message.payload)
        headers = dict(payload.headers or {})
        headers["notify-dead-letter-group"] = self.name
        headers["notify-dead-letter-topic"] = payload.topic
        headers["notify-dead-letter-queue"] = str(message.queue)
        headers["notify-dead-letter-offset"] = str(message.offset)
        headers["notify-dead-letter-attempts"] = str(attempts)
        headers["notify-dead-letter-reason"] = reason[:500]
        return encode_msgpack(Payload(payload.topic, payload.body, payload.key, payload.tag, headers))

    # --- time -------------------------------------------------------------------------------------------------

    def next_event_us(self, now_us: int) -> int | None:
        """When a lease runs out, a retry comes due, an owner's time is over, or the rate allows more."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._due:
            times.append(self._due[0][0])
        if self._worn_out:
            times.append(now_us)
        if self._paced_until_us > now_us:
            times.append(self._paced_until_us)
        times += [owner.until_us for owner in self.owners.values() if owner.until_us > now_us]
        if self.rate is not None and not self.rate.available(now_us):
            times.append(self.rate.refilled_us(now_us))
        return min(times, default=None)

    async def expire(self, now_us: int) -> None:
        """End what ran out: those messages are available again at once, or dead after their last attempt."""
        while self._due and self._due[0][0] <= now_us:
            cursor = heapq.heappop(self._due)[2]
            if self.cursors.get((cursor.topic, cursor.queue)) is cursor:
                self.turns.wake(cursor)
        ended: list[tuple[Lease, int]] = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.leases.get(lease_id)
            if lease is None:
                continue
            over = [index for index in sorted(lease.open) if lease.extended.get(index, 0) <= now_us]
            ended += [(lease, lease.offsets[index]) for index in over]
            for index in over:
                self._close(lease, range(index, index + 1))
            if lease.open:
                heapq.heappush(self._deadlines, (min(lease.extended.values()), lease_id))
        self._come_back(ended, now_us)
        if self._worn_out:
            dead, self._worn_out = self._worn_out, []
            await self._dead_letter(dead, now_us)

    def lag(self) -> int:
        """Messages that the group has not settled yet, in all its queues."""
        return sum(cursor.lag() for cursor in self.cursors.values())

    def in_flight(self) -> int:
        return sum(len(lease.open) for lease in self.leases.values())
