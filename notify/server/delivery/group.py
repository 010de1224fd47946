"""One consumer group: its cursors, its leases, and what becomes of a message that is settled or not settled."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from notify.errors import Conflict, Forbidden, InvalidRequest, NotifyError, StaleReceipt
from notify.limits import LIMITS, check_between
from notify.message import REPLAY
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import ACTIVE_US, Instance
from notify.server.delivery.leases import Acked, Attempt, Dead, Handed, Lease, Owner, Plan
from notify.server.delivery.ordered import OrderedCursor
from notify.server.delivery.pace import BEHIND, BUSY_LIMIT, Pace
from notify.server.delivery.turns import Turns
from notify.server.metrics import Metrics
from notify.server.rate import TokenBucket
from notify.storage.groups import SettleKind, Subscription
from notify.storage.progress import to_runs
from notify.storage.queues import Store
from notify.storage.records import StoredMessage
from notify.wire import Payload, SettledItem, SettleItem, decode_payload, encode_msgpack

READ_BYTES = 8 << 20
LOOK_AGAIN_US = 250_000
"""A lease that ran out while the storage refused to record it is looked at again after so long."""
MOST_INSTANCES = 10_000
"""Names of consumers that are remembered although they do not ask any more."""


RECEIPT_CHARACTERS = 16
"""A lease has so many hexadecimal digits at most."""
OWNED = ("exclusive", "failover")
"""Modes in which one instance has the topic to itself."""


def lease_of(receipt: str) -> int | None:
    """The lease that a receipt names; None where it is no receipt."""
    token = receipt.partition(".")[0]
    if len(token) > RECEIPT_CHARACTERS:
        return None
    try:
        return int(token, 16)
    except ValueError:
        return None


class Group:
    """A consumer group: by its subscriptions' modes, any instance and many messages in flight, or in an order."""

    def __init__(
        self,
        name: str,
        store: Store,
        metrics: Metrics,
        lease_ids: Iterator[int],
        pace: Pace,
        holders: dict[int, Group] | None = None,
    ) -> None:
        """`holders`: where to note, for as long as there is one, whose a lease is."""
        self.name = name
        self._holders = holders
        self._pace = pace
        self._paced_until_us = 0
        self.paused = False
        self.has_broadcast = False
        self.cursors: dict[tuple[str, int], Cursor] = {}
        self.turns = Turns(store.priorities(name))
        self.rate: TokenBucket | None = None
        """How many messages it is given in a second."""
        self.scheduled_us: int | None = None
        """When `expire` is to be called next, as far as `Delivery` has been told."""
        self.has_skipped = False
        """The last receive stopped among messages that the group does not want: there may be some behind them."""
        self.wait_seconds = 0.0
        """How long to wait where it has skipped some: the filters' share of the server's time is spent."""
        self.is_to_be_served = False
        """Who waits is served again soon: it has skipped some."""
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
        self._growth: dict[str, int] = {}
        """By topic that has grown: which of its growths its queues are not through with yet."""

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
        self._growth.pop(subscription.topic, None)
        if subscription.mode != "broadcast":
            self._growth[subscription.topic] = 0
            self._look_at_growth()

    def _look_at_growth(self) -> bool:
        """Let queues of topics that grew go on where all are through with that growth; whether any may go on.

        A key may have changed its queue by it, and its later messages wait for its earlier ones.
        """
        any_goes_on = False
        for name, before in list(self._growth.items()):
            topic = self._store.topic(name)
            if topic is None:
                del self._growth[name]
                continue
            cursors = [self.cursors[(name, queue)] for queue in range(topic.queues)]
            number = before
            while number < len(topic.grown) and all(
                cursor.is_through(end) for cursor, end in zip(cursors, topic.grown[number], strict=False)
            ):
                number += 1
            ends: Iterable[int | None]
            if number < len(topic.grown):
                self._growth[name] = number
                ends = itertools.chain(topic.grown[number], itertools.repeat(0))  # queues since then wait wholly
            else:
                del self._growth[name]
                ends = itertools.repeat(None)
            for cursor, end in zip(cursors, ends, strict=False):
                cursor.until = end
                if number != before or end is None:
                    self.turns.wake(cursor)
                    any_goes_on = True
        return any_goes_on

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

    def unsubscribe(self, topic: str) -> None:
        for key in [key for key in self.cursors if key[0] == topic]:
            self.drop_leases(*key)
            self._forget(self.cursors[key])
        self.turns.forget(topic)
        self.owners.pop(topic, None)
        self._growth.pop(topic, None)

    def drop_leases(self, topic: str, queue: int) -> None:
        """Receipts of this queue become stale."""
        stale = [
            lease.id for lease in self.leases.values() if lease.cursor.topic == topic and lease.cursor.queue == queue
        ]
        for lease_id in stale:
            self._drop_lease(self.leases[lease_id])

    def _drop_lease(self, lease: Lease) -> None:
        self._end_lease(lease)
        lease.instance.drop(len(lease.open))

    # --- handing out ------------------------------------------------------------------------------------------

    def receive(
        self,
        name: str,
        topics: frozenset[str] | None,
        limit: int,
        lease_us: int,
        now_us: int,
        may: Callable[[str], bool] | None = None,
    ) -> list[Handed]:
        """Up to `limit` messages under leases, by the topics' classes and in turn.

        `may`: whether who asks may receive a topic, asked now: a right can have ended while a poll waited.
        """
        self.has_skipped = False
        self.wait_seconds = 0.0
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
        self._look_at_growth()
        started = 0.0
        try:
            while count < limit and size < READ_BYTES:
                cursor = turns.next()
                if cursor is None:
                    # The message that it has just passed may be the last one from before a growth.
                    if self._growth and self._look_at_growth():
                        continue
                    break
                mode = cursor.subscription.mode
                if (
                    (topics is not None and cursor.serves not in topics)
                    or (may is not None and not may(cursor.serves))
                    or (mode in OWNED and not self._owns(name, cursor.topic, lease_us, now_us))
                ):
                    aside.append(turns.put_aside())
                    continue
                if not started and self._pace.is_busy and cursor.is_behind(BEHIND // turns.awake()):
                    started = time.perf_counter()
                    limit = min(limit, BUSY_LIMIT)
                if cursor.evaluates:
                    self.wait_seconds = self._pace.evaluation_wait()
                    if self.wait_seconds:
                        self.has_skipped = True
                        aside.append(turns.put_aside())
                        continue
                    evaluating = time.thread_time()  # CPU: who waits for a core costs nobody anything
                    taken = cursor.take(turns.left(cursor, limit - count), now_us)
                    self._pace.evaluated(time.thread_time() - evaluating)
                else:
                    taken = cursor.take(turns.left(cursor, limit - count), now_us)
                turns.served(cursor, len(taken))
                if taken:
                    handed.append(self._lease(cursor, taken, instance, lease_us, now_us))
                    count += len(taken)
                    size += sum([len(m.payload) for m in taken])
                elif cursor.is_awake:
                    self.has_skipped = True
                    break
                if cursor.evaluates:
                    break  # what it may evaluate in one go is evaluated, or nearly so
        except NotifyError:
            if not handed:  # what is leased already must reach its consumer
                raise
        finally:
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

    def refuse_second(
        self,
        instance: str,
        topics: frozenset[str] | None,
        now_us: int,
        may: Callable[[str], bool] | None = None,
    ) -> None:
        """Raises Conflict if another instance has an exclusive topic: a standby is a mistake there.

        `may`: whether who asks may consume a topic; what it may not is nothing to it.
        """
        for topic, owner in self.owners.items():
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

    def _owns(self, instance: str, topic: str, lease_us: int, now_us: int) -> bool:
        """Whether the instance has the topic, taking it if nobody has it any more."""
        owner = self.owners.get(topic)
        if owner is not None and owner.instance != instance:
            if owner.until_us > now_us:
                return False
            self._take_back(topic, now_us)
            owner = None
        until_us = now_us + lease_us
        self.owners[topic] = Owner(instance, until_us if owner is None else max(until_us, owner.until_us))
        return True

    def _take_back(self, topic: str, now_us: int) -> None:
        """Make available again, in order, what the topic's last owner has not settled; each is at its next attempt."""
        leases = [lease for lease in self.leases.values() if lease.cursor.topic == topic]
        self._come_back([(lease, index) for lease in leases for index in sorted(lease.open)], now_us)

    def _come_back(self, ended: list[tuple[Lease, int]], now_us: int) -> None:
        """Leases of these messages have ended unsettled: they are available at once, or dead after their last attempt.

        Raises what the storage refuses with; the messages that it did not record stay leased.
        """
        by_cursor: dict[Cursor, list[tuple[Lease, int]]] = {}
        for lease, index in ended:
            by_cursor.setdefault(lease.cursor, []).append((lease, index))
        expired: Counter[Instance] = Counter()
        try:
            self._end_all(by_cursor, now_us, expired)
        finally:
            for instance, count in expired.items():
                instance.expire(count)
                self._metrics.leases_expired += count

    def _end_all(
        self, by_cursor: dict[Cursor, list[tuple[Lease, int]]], now_us: int, expired: Counter[Instance]
    ) -> None:
        for cursor, ended in by_cursor.items():
            again: list[Attempt] = []
            dead: list[Dead] = []
            for lease, index in ended:
                offset = lease.offsets[index]
                attempts = cursor.attempts(offset) + 1
                if attempts >= cursor.subscription.max_attempts:
                    dead.append(Dead(lease, index, f"{attempts} attempts, the last one's lease ran out"))
                else:
                    again.append(Attempt(lease, index, attempts, 0))
            self._try_again(cursor, again, now_us, expired)
            self._bury(cursor, dead, now_us, expired)

    def _still_there(self, lease: Lease, until_us: int) -> None:
        """An owner that settles keeps its topic for as long as its leases were; one that renews, as long as it asks."""
        owner = self.owners.get(lease.cursor.topic)
        if owner is not None and owner.instance == lease.instance.name:
            owner.until_us = max(owner.until_us, until_us)

    def _lease(
        self, cursor: Cursor, taken: list[StoredMessage], instance: Instance, lease_us: int, now_us: int
    ) -> Handed:
        lease = Lease(next(self._lease_ids), cursor, [m.offset for m in taken], now_us, lease_us, instance)
        self.leases[lease.id] = lease
        if self._holders is not None:
            self._holders[lease.id] = self
        instance.handed(len(taken), now_us)
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.id))
        token = f"{lease.id:x}."
        self._metrics.delivered += len(taken)
        before, replay = cursor.progress.attempts, cursor.subscription.replay
        if not before:
            return Handed(token, taken, None, replay)
        attempts = [before.get(m.offset, 0) + 1 for m in taken]
        self._metrics.redelivered += sum([attempt > 1 for attempt in attempts])
        return Handed(token, taken, attempts, replay)

    # --- settling ---------------------------------------------------------------------------------------------

    async def settle(
        self, items: list[SettleItem], now_us: int, may: Callable[[str], bool] | None = None
    ) -> list[SettledItem]:
        """Carry out what a consumer says of its messages; durable when it returns.

        `may`: whether who asks may settle messages of a topic; None: of every one. Raises what the storage refuses
        with where it refuses all of them. An item that it refused may be sent again: its lease goes on.
        """
        plan = Plan()
        answered: list[SettledItem | None] = []
        for number, item in enumerate(items):
            try:
                lease, indexes = self._of_receipt(item.receipt, plan)
                if may is not None and not may(lease.cursor.serves):
                    raise Forbidden(f"these are messages of topic {lease.cursor.serves!r}, which you may not consume")
                self._plan(plan, number, item, lease, indexes, now_us)
            except NotifyError as error:
                answered.append(SettledItem(item.receipt, error.status, error.code, str(error)))
            else:
                answered.append(None)
        refused = self._carry_out(plan, now_us)
        if refused and len(refused) == len(items):
            raise next(iter(refused.values()))
        await self._store.sync()
        for number, refusal in refused.items():
            answered[number] = SettledItem(items[number].receipt, refusal.status, refusal.code, str(refusal))
        return [
            SettledItem(item.receipt, 200) if answer is None else answer
            for item, answer in zip(items, answered, strict=True)
        ]

    def _carry_out(self, plan: Plan, now_us: int) -> dict[int, NotifyError]:
        """Append what was planned, and change what is in memory as far as that succeeds; else why, by the item."""
        refused: dict[int, NotifyError] = {}
        steps: tuple[tuple[Callable[[Cursor, list[Any], int], None], dict[Cursor, list[Any]]], ...] = (
            (self._ack, plan.acked),
            (self._try_again, plan.again),
            (self._bury, plan.dead),
        )
        for step, by_cursor in steps:
            for cursor, asked in by_cursor.items():
                try:
                    step(cursor, asked, now_us)
                except NotifyError as refusal:
                    refused.update(dict.fromkeys([one.item for one in asked], refusal))
        return refused

    def _ack(self, cursor: Cursor, acked: list[Acked], now_us: int) -> None:
        offsets: list[int] = []
        for lease, places, _ in acked:
            offsets += lease.offsets[places.start : places.stop]
        self._store.settle_soon(self.name, cursor.topic, cursor.queue, to_runs(sorted(offsets)), SettleKind.ACK)
        for lease, places, _ in acked:
            lease.instance.finish(len(places), now_us)
            self._close(lease, places)
        self._metrics.acked += len(offsets)
        cursor.finished(offsets)
        self.turns.wake(cursor)

    def _try_again(
        self, cursor: Cursor, again: list[Attempt], now_us: int, expired: Counter[Instance] | None = None
    ) -> None:
        """These attempts failed: another follows when it is due. `expired` counts those whose lease ran out."""
        if not again:
            return
        attempts = [(a.lease.offsets[a.place], a.attempts, a.due_us) for a in again]
        self._store.attempted(self.name, cursor.topic, cursor.queue, attempts)
        for a in again:
            self._end(a.lease, a.place, now_us, expired)
            cursor.come_back(a.lease.offsets[a.place], a.due_us or now_us)
            if a.due_us:
                self._wake_at(cursor, a.due_us)
            else:
                self.turns.wake(cursor)

    def _bury(self, cursor: Cursor, dead: list[Dead], now_us: int, expired: Counter[Instance] | None = None) -> None:
        """Move messages to the dead letters; damaged ones and those that are not retained are only settled."""
        letters: list[tuple[StoredMessage, bytes]] = []
        gone: list[tuple[int, SettleKind]] = []
        for d in dead:
            offset = d.lease.offsets[d.place]
            read = self._store.read(cursor.topic, cursor.queue, offset, 1, READ_BYTES)
            if read and read[0].offset == offset and not read[0].corrupt:
                letters.append((read[0], self._dead_payload(cursor, read[0], cursor.attempts(offset) + 1, d.reason)))
            else:
                is_corrupt = bool(read) and read[0].offset == offset
                gone.append((offset, SettleKind.CORRUPT if is_corrupt else SettleKind.EXPIRED))
        for offset, kind in gone:
            self._store.settle_soon(self.name, cursor.topic, cursor.queue, [(offset, 1)], kind)
        if letters:
            self._store.dead_letter_soon(self.name, letters, now_us)
            self._metrics.dead_lettered += len(letters)
        for d in dead:
            self._end(d.lease, d.place, now_us, expired)
            cursor.finished((d.lease.offsets[d.place],))
            self.turns.wake(cursor)

    def _end(self, lease: Lease, index: int, now_us: int, expired: Counter[Instance] | None) -> None:
        """One message of a lease is no longer with its instance."""
        if expired is None:
            lease.instance.finish(1, now_us)
        else:
            expired[lease.instance] += 1
        self._close(lease, range(index, index + 1))

    def _of_receipt(self, receipt: str, plan: Plan) -> tuple[Lease, range]:
        """The messages a receipt names: `lease.index`, or `lease.first-last` for a range.

        Raises StaleReceipt, or InvalidRequest for what is no receipt.
        """
        index = receipt.partition(".")[2]
        lease_id = lease_of(receipt)
        try:
            if lease_id is None:
                raise ValueError
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
        planned = plan.taken.get(lease_id)
        if planned is not None and not planned.isdisjoint(indexes):
            raise StaleReceipt("another item of this request settles the message already")
        return lease, indexes

    def _plan(self, plan: Plan, number: int, item: SettleItem, lease: Lease, indexes: range, now_us: int) -> None:
        """Note what an item asks for. Raises InvalidRequest for what cannot be asked for."""
        cursor = lease.cursor
        if item.action == "renew":
            self._renew(lease, indexes, item.lease, now_us)
            return
        if item.action == "ack":
            plan.acked.setdefault(cursor, []).append(Acked(lease, indexes, number))
        elif item.action == "dead_letter":
            reason = item.reason or "refused by the consumer"
            plan.dead.setdefault(cursor, []).extend([Dead(lease, index, reason, number) for index in indexes])
        elif item.action == "retry":
            if item.delay is not None:
                check_between("delay", item.delay, 0, LIMITS.delay_seconds)
            for index in indexes:
                attempts = cursor.attempts(lease.offsets[index]) + 1
                if attempts >= cursor.subscription.max_attempts:
                    reason = item.reason or f"{attempts} attempts failed"
                    plan.dead.setdefault(cursor, []).append(Dead(lease, index, reason, number))
                else:
                    due_us = now_us + self._back_off_us(cursor, attempts, item.delay)
                    plan.again.setdefault(cursor, []).append(Attempt(lease, index, attempts, due_us, number))
        else:
            raise InvalidRequest(
                f"action {item.action[:20]!r} is not ack, retry, dead_letter or renew", "invalid_action"
            )
        plan.taken.setdefault(lease.id, set()).update(indexes)
        self._still_there(lease, now_us + lease.length_us)

    def _renew(self, lease: Lease, indexes: range, seconds: float | None, now_us: int) -> None:
        seconds = 30.0 if seconds is None else seconds
        check_between("lease", seconds, LIMITS.lease_min_seconds, LIMITS.lease_max_seconds)
        until_us = now_us + round(seconds * 1_000_000)
        lease.extended.update(dict.fromkeys(indexes, until_us))
        self._still_there(lease, until_us)

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
            self._end_lease(lease)

    def _end_lease(self, lease: Lease) -> None:
        self.leases.pop(lease.id, None)
        if self._holders is not None:
            self._holders.pop(lease.id, None)

    def _dead_payload(self, cursor: Cursor, message: StoredMessage, attempts: int, reason: str) -> bytes:
        """The message with headers that say where it comes from and why it is here."""
        payload = decode_payload(message.payload)
        headers = dict(payload.headers or {})
        headers["notify-dead-letter-group"] = self.name
        headers["notify-dead-letter-topic"] = payload.topic
        headers["notify-dead-letter-queue"] = str(message.queue)
        headers["notify-dead-letter-offset"] = str(message.offset)
        headers["notify-dead-letter-attempts"] = str(attempts)
        headers["notify-dead-letter-reason"] = reason[:500]
        if cursor.subscription.replay:
            headers[REPLAY] = str(cursor.subscription.replay)
        return encode_msgpack(Payload(payload.topic, payload.body, payload.key, payload.tag, headers))

    # --- time -------------------------------------------------------------------------------------------------

    def next_event_us(self, now_us: int) -> int | None:
        """When a lease runs out, a retry comes due, an owner's time is over, or the rate allows more."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._due:
            times.append(self._due[0][0])
        if self._paced_until_us > now_us:
            times.append(self._paced_until_us)
        times += [owner.until_us for owner in self.owners.values() if owner.until_us > now_us]
        if self.rate is not None and not self.rate.available(now_us):
            times.append(self.rate.refilled_us(now_us))
        return min(times, default=None)

    def expire(self, now_us: int) -> None:
        """End what ran out: those messages are available again at once, or dead after their last attempt.

        Raises what the storage refuses with; those leases go on, and are looked at again a moment later.
        """
        while self._due and self._due[0][0] <= now_us:
            cursor = heapq.heappop(self._due)[2]
            if self.cursors.get((cursor.topic, cursor.queue)) is cursor:
                self.turns.wake(cursor)
        over: list[tuple[Lease, int]] = []
        looked_at: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            lease = self.leases.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                looked_at.append(lease)
                over += [(lease, index) for index in sorted(lease.open) if lease.extended.get(index, 0) <= now_us]
        try:
            self._come_back(over, now_us)
        finally:
            for lease in looked_at:
                if lease.open:
                    until_us = min(lease.extended.get(index, 0) for index in lease.open)
                    heapq.heappush(self._deadlines, (max(until_us, now_us + LOOK_AGAIN_US), lease.id))

    def lag(self) -> int:
        """Messages that the group has not settled yet, in all its queues."""
        return sum(cursor.lag() for cursor in self.cursors.values())

    def in_flight(self) -> int:
        return sum(len(lease.open) for lease in self.leases.values())
