"""All groups: who waits for messages, who subscribes to what, and the clock that drives leases, retries and delays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from notify.errors import Conflict, InvalidRequest, NotFound, NotifyError, Unavailable
from notify.limits import LIMITS, check_between, check_name
from notify.server.clock import Clock
from notify.server.delivery.group import Group
from notify.server.delivery.instances import ACTIVE_US, Instance
from notify.server.delivery.leases import LOOK_AGAIN_US, Handed
from notify.server.delivery.pace import Pace
from notify.server.delivery.receipts import lease_of
from notify.server.metrics import Metrics
from notify.server.rate import TokenBucket
from notify.server.topics import Topics, is_meant
from notify.storage.groups import Priorities, Subscription
from notify.storage.queues import Store
from notify.storage.topics import Topic
from notify.wire import Receive, SettledItem, SettleItem, microseconds

RELEASE_BATCH = 5_000
INSTANCE_IDLE_US = 86_400_000_000
"""How long messages are kept for an instance of a broadcast that asks for none."""
FORGET_EVERY_US = 60_000_000
MOST_BROADCAST_INSTANCES = 1_000
"""The most instances of a broadcasting group: messages are kept for each that asked within INSTANCE_IDLE_US."""

May = Callable[[str], bool]
"""Whether who asks may consume a topic, by its name, as of now."""


class _Waiter:
    __slots__ = ("answer", "instance", "lease_us", "max", "may", "topics")

    def __init__(
        self,
        request: Receive,
        topics: frozenset[str] | None,
        may: May | None,
        answer: asyncio.Future[list[Handed]],
    ) -> None:
        self.instance = request.instance
        self.may = may
        self.topics = topics
        self.max = request.max
        self.lease_us = round(request.lease * 1_000_000)
        self.answer = answer


class Delivery:
    """Consumer groups over a storage. Methods belong to the event loop."""

    def __init__(self, store: Store, clock: Clock, metrics: Metrics, topics: Topics) -> None:
        self._store = store
        self._topics = topics
        self._clock = clock
        self._metrics = metrics
        self.groups: dict[str, Group] = {}
        self._waiters: dict[str, deque[_Waiter]] = {}
        self._by_topic: dict[str, set[str]] = {}
        self._pace = Pace(metrics, clock())
        self._rates: dict[str, TokenBucket] = {}
        self._instances: dict[str, list[Group]] = {}
        """The instances of each broadcasting group; an instance is a group of its own, named `group@instance`."""
        self._holders: dict[int, str] = {}
        """Whose each lease of such an instance is, by the name of its group."""
        self._forgot_us = clock()
        self._lease_ids = _lease_ids()
        self._events: list[tuple[int, int, Group]] = []
        """Heap of when a group has to look at its leases, retries and owners again."""
        self._numbers = itertools.count()
        self._release_again_us = 0
        for subscription in store.subscriptions():
            self._follow(subscription, moved=True)
        self._recovered = frozenset(self.groups) | {pattern.group for pattern in store.patterns()}
        """Groups that were there before the start. Their consumers may come back, and are not known until then."""
        self._started_us = clock()
        self._topics.tell(self.topic_changed)
        store.on_visible(self.visible)

    def _follow(self, subscription: Subscription, moved: bool) -> None:
        group = self.groups.get(subscription.group)
        if group is None:
            name, _, instance = subscription.group.partition("@")
            holders = self._holders if instance else None
            group = Group(subscription.group, self._store, self._metrics, self._lease_ids, self._pace, holders)
            group.paused = name in self._store.paused()
            group.rate = self._rates.get(name)
            self.groups[subscription.group] = group
            if instance:
                group.instances[instance] = Instance(instance, self._clock())
                self._instances.setdefault(name, []).append(group)
        topic = self._store.topic(subscription.topic)
        assert topic is not None
        group.subscribe(subscription, topic.queues, moved)
        self._by_topic.setdefault(subscription.topic, set()).add(subscription.group)
        self._schedule(group)

    def _schedule(self, group: Group) -> None:
        """Note when the group has to be looked at next, if that is sooner than was known."""
        due_us = group.next_event_us(self._clock())
        if due_us is not None and (group.scheduled_us is None or due_us < group.scheduled_us):
            group.scheduled_us = due_us
            heapq.heappush(self._events, (due_us, next(self._numbers), group))

    # --- subscriptions ----------------------------------------------------------------------------------------

    async def subscribe(self, subscription: Subscription, start: str | int | datetime | None) -> Subscription:
        """Make or change a subscription. `start` None leaves an existing position alone (new ones: latest)."""
        check_name("group", subscription.group)
        check_name("topic", subscription.topic)
        return await self._subscribe(subscription, start)

    async def _subscribe(self, subscription: Subscription, start: str | int | datetime | None) -> Subscription:
        topic = self._store.topic(subscription.topic) or self._topics.put_soon(Topic(subscription.topic))
        known = self._store.subscription(subscription.group, subscription.topic)
        offsets: list[int] | None = None
        if start is not None or known is None:
            offsets = [self.resolve(subscription.topic, q, start or "latest") for q in range(topic.queues)]
        elif known.epoch > subscription.epoch:
            subscription = dataclasses.replace(subscription, epoch=known.epoch)
        self._store.subscribe_soon(subscription, offsets)
        self._follow(subscription, moved=offsets is not None)
        self._serve(subscription.group)
        await self._store.sync()
        return subscription

    async def follow_retries(self, subscription: Subscription) -> None:
        """Hand a group, beside a topic of its own, what is sent to it again: from the first message on."""
        topic = self._store.topic(subscription.topic)
        assert topic is not None
        self._store.subscribe_soon(subscription, [0] * topic.queues)
        self._follow(subscription, moved=True)
        await self._store.sync()

    def may_come_back(self, group: str) -> bool:
        """Whether consumers of a group may have asked shortly before this server started."""
        return group in self._recovered and self._clock() - self._started_us < ACTIVE_US

    def instances_of(self, group: str) -> list[Group]:
        """The instances of a broadcasting group; none for another group."""
        return self._instances.get(group, [])

    async def reset(self, subscription: Subscription, to: str | int | datetime) -> Subscription:
        """Move a group in a topic; what it has leased there is stale, and a new epoch begins."""
        moved = dataclasses.replace(subscription, epoch=subscription.epoch + 1)
        return await self._subscribe(moved, to)

    async def subscribe_pattern(self, subscription: Subscription, start: str | int | datetime | None) -> list[str]:
        """Subscribe to topics of a pattern, those to come from their first message on; the names of those there are."""
        names = [t.name for t in self._store.topics() if is_meant(subscription.topic, t.name)]
        self._change_followed(subscription, names)
        await self._store.set_pattern(subscription)
        for name in names:
            if self._store.subscription(subscription.group, name) is None:
                await self._subscribe(dataclasses.replace(subscription, topic=name), start)
        return names

    def _change_followed(self, pattern: Subscription, names: Sequence[str]) -> None:
        """Give a pattern's new settings to the topics that follow its settings as they were.

        A topic whose settings are others was subscribed by its name, and keeps them. Nothing is awaited: where the
        storage refuses, the pattern is as it was, and the same request can be sent again.
        """
        before = next((p for p in self._store.patterns() if (p.group, p.topic) == (pattern.group, pattern.topic)), None)
        if before is None or _settings(before) == _settings(pattern):
            return
        for name in names:
            known = self._store.subscription(pattern.group, name)
            if known is not None and _settings(known) == _settings(before):
                changed = dataclasses.replace(known, **_settings(pattern))
                self._store.subscribe_soon(changed, None)
                self._follow(changed, moved=False)
        self._serve(pattern.group)

    def topic_changed(self, topic: Topic) -> None:
        """A topic was made, or has other queues: its groups follow them, and so do groups with a pattern for it."""
        for name in list(self._by_topic.get(topic.name, ())):
            subscription = self._store.subscription(name, topic.name)
            if subscription is not None:
                self._follow(subscription, moved=False)
        for pattern in self._store.patterns():
            if is_meant(pattern.topic, topic.name) and pattern.group not in self._by_topic.get(topic.name, ()):
                subscription = self._store.subscription(pattern.group, topic.name)
                if subscription is not None:  # made with the topic; a group may also have left one that is older
                    self._follow(subscription, moved=True)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        """Other classes, weights or shares from now on."""
        await self._store.set_priorities(group, priorities)
        if group in self.groups:
            self.groups[group].turns.change(priorities, self.groups[group].cursors.values())

    def set_rates(self, per_second: dict[str, float]) -> None:
        """How many messages a second each of these groups is given; the others as many as they take."""
        now_us = self._clock()
        self._rates = {group: TokenBucket(rate, now_us) for group, rate in per_second.items()}
        for group in self.groups.values():
            group.rate = self._rates.get(group.name.partition("@")[0])
            self._serve(group.name)

    def lag(self, topic: str) -> int:
        """How far the slowest group is behind in a topic, in messages; 0 where no group subscribes to it."""
        return max((self._lag_of(group, topic) for group in self._by_topic.get(topic, ())), default=0)

    def subscriptions_of(self, topic: str) -> list[tuple[Subscription, int]]:
        """Who subscribes to a topic, and how far each is behind, in messages."""
        found = []
        for name in sorted(self._by_topic.get(topic, ())):
            cursor = self.groups[name].cursors.get((topic, 0))
            if cursor is not None:
                found.append((cursor.subscription, self._lag_of(name, topic)))
        return found

    def floor(self, topic: str, queue: int) -> int | None:
        """Below it every group has settled everything in a queue; None where no group subscribes."""
        cursors = [self.groups[name].cursors.get((topic, queue)) for name in self._by_topic.get(topic, ())]
        floors = [c.progress.floor for c in cursors if c is not None and c.subscription.mode != "broadcast"]
        return min(floors, default=None)

    def _lag_of(self, name: str, topic: str) -> int:
        cursors = self.groups[name].cursors
        lag = queue = 0
        while (cursor := cursors.get((topic, queue))) is not None:
            lag += cursor.lag()
            queue += 1
        return lag

    def resolve(self, topic: str, queue: int, start: str | int | datetime) -> int:
        """The offset that `earliest`, `latest`, an offset or an instant stands for."""
        first, end = self._store.bounds(topic, queue)
        if isinstance(start, bool):
            raise InvalidRequest("start is earliest, latest, an offset or an instant", "invalid_start")
        if isinstance(start, int):
            if not first <= start <= end:
                raise InvalidRequest(
                    f"offset {start} is beyond what queue {queue} of topic {topic!r} holds: {first} to {end}",
                    "out_of_bounds",
                )
            return start
        if start == "earliest":
            return first
        if start == "latest":
            return end
        if isinstance(start, str):
            text = start
            try:
                start = datetime.fromisoformat(text)
            except ValueError:
                raise InvalidRequest(
                    f"start {text[:40]!r} is not earliest, latest, an offset or an instant", "invalid_start"
                ) from None
        try:
            time_us = microseconds(start)
        except ValueError as error:
            raise InvalidRequest(str(error), "invalid_start") from None
        if time_us > self._clock():
            raise InvalidRequest(f"{start.isoformat()} is in the future; `latest` begins now", "out_of_bounds")
        return self._store.offset_at(topic, queue, time_us)

    async def unsubscribe(self, group: str, topic: str) -> None:
        """Drop a subscription, and those of the instances it is broadcast to. Raises NotFound."""
        await self._store.unsubscribe(group, topic)
        self.forget(group, topic)
        for instance in list(self._instances.get(group, ())):
            if topic in instance.modes():
                await self._end_subscription(instance.name, topic)

    async def _end_subscription(self, group: str, topic: str) -> None:
        """Drop a subscription, if nobody else has dropped it meanwhile."""
        with contextlib.suppress(NotFound):
            await self._store.unsubscribe(group, topic)
        self.forget(group, topic)

    def forget(self, group: str, topic: str) -> None:
        """Drop a subscription that the storage no longer has."""
        if group in self.groups:
            self.groups[group].unsubscribe(topic)
        self._by_topic.get(topic, set()).discard(group)

    # --- receiving --------------------------------------------------------------------------------------------

    async def receive(self, name: str, request: Receive, may: May | None = None) -> list[Handed]:
        """Messages for an instance of a group, waiting up to `wait` seconds for the first.

        `may` is asked again whenever something is handed out; None: who asks may consume everything.
        """
        check_name("group", name)
        if not 0 < len(request.instance) <= 255:
            raise InvalidRequest("instance is 1 to 255 characters", "out_of_bounds")
        check_between("max", request.max, 1, LIMITS.max_messages)
        check_between("wait", request.wait, 0, LIMITS.wait_seconds)
        check_between("lease", request.lease, LIMITS.lease_min_seconds, LIMITS.lease_max_seconds)
        topics = None
        if request.topics is not None:
            check_between("the number of topics", len(request.topics), 0, LIMITS.topics)
            topics = frozenset(request.topics)
            await self._subscribe_missing(name, request.topics)
        if name in self.groups:
            name, topics = await self._of_broadcast(name, request.instance, topics, may)
        group = self.groups.get(name)
        if group is None:
            raise NotFound(f"group {name!r} has no subscription; name its topics, or subscribe it first")
        group.refuse_second(request.instance, topics, self._clock(), may)
        waiter = _Waiter(request, topics, may, asyncio.get_running_loop().create_future())
        handed = self._hand_out(group, waiter)
        if handed or request.wait <= 0:
            return handed
        waiting = self._waiters.setdefault(name, deque())
        waiting.append(waiter)
        self._serve_on(group)
        try:
            return await asyncio.wait_for(waiter.answer, request.wait or 0.001)
        except TimeoutError:
            return []
        finally:
            if waiter in waiting:
                waiting.remove(waiter)

    async def _of_broadcast(
        self, name: str, instance: str, topics: frozenset[str] | None, may: May | None
    ) -> tuple[str, frozenset[str] | None]:
        """Where topics are broadcast, the group that is this instance alone: it begins when it first asks.

        Without `topics` those are meant that who asks `may` consume. Raises InvalidRequest for a request over topics of
        which only some are broadcast.
        """
        group = self.groups[name]
        if not group.has_broadcast:
            return name, topics
        modes = group.modes()
        asked = frozenset(t for t in modes if may is None or may(t)) if topics is None else topics
        broadcast = frozenset(topic for topic in asked if modes.get(topic) == "broadcast")
        if not broadcast:
            return name, topics
        if broadcast != asked:
            raise InvalidRequest(
                f"topics {', '.join(sorted(broadcast))} are broadcast in group {name!r}: receive them in a request of "
                "their own",
                "mixed_modes",
            )
        own = f"{name}@{instance}"
        known = self.groups[own].modes() if own in self.groups else {}
        if own not in self.groups and len(self._instances.get(name, ())) >= MOST_BROADCAST_INSTANCES:
            raise Conflict(
                f"group {name!r} keeps messages for {MOST_BROADCAST_INSTANCES} instances already: give each consumer a "
                "name that stays the same over its starts (`instance`); one that asks for nothing is forgotten after "
                f"{INSTANCE_IDLE_US // 3_600_000_000} hours",
                "too_many_instances",
            )
        for topic in sorted(broadcast):
            if topic not in known:
                of_group = self._store.subscription(name, topic)
                assert of_group is not None
                await self._subscribe(dataclasses.replace(of_group, group=own, mode="shared"), "latest")
        return own, broadcast

    async def _forget_instances(self, now_us: int) -> None:
        """Instances that have not asked for long get no more messages kept for them."""
        self._forgot_us = now_us
        for group in self.groups.values():
            if "@" not in group.name:
                group.forget_instances(now_us - INSTANCE_IDLE_US)
        # Meanwhile the disk is waited for, and others join, come back, or end their subscriptions.
        for group in [group for instances in self._instances.values() for group in instances]:
            if now_us - max(i.asked_us for i in group.instances.values()) > INSTANCE_IDLE_US and not group.leases:
                for topic in group.modes():
                    await self._end_subscription(group.name, topic)
                self._drop_instance(group)

    def _drop_instance(self, group: Group) -> None:
        """Nothing is kept for an instance of a broadcast any more; where it has come back it asks, and begins, anew."""
        instances = self._instances.get(group.name.partition("@")[0], [])
        if group in instances:
            instances.remove(group)
        self.groups.pop(group.name, None)
        for waiter in self._waiters.pop(group.name, ()):
            if not waiter.answer.done():
                waiter.answer.set_result([])

    async def _subscribe_missing(self, group: str, topics: Sequence[str]) -> None:
        known = {topic for topic, _ in self.groups[group].cursors} if group in self.groups else set()
        for name in topics:
            if name not in known:
                self._topics.use(name)
                await self.subscribe(Subscription(group, name), None)

    def _hand_out(self, group: Group, waiter: _Waiter) -> list[Handed]:
        handed = group.receive(waiter.instance, waiter.topics, waiter.max, waiter.lease_us, self._clock(), waiter.may)
        self._schedule(group)
        return handed

    def visible(self, topics: set[str]) -> None:
        """Messages became durable in these topics: serve who waits."""
        to_serve: dict[str, None] = {}
        for topic in topics:
            for name in self._by_topic.get(topic, ()):
                self.groups[name].wake(topic)
                if self._waiters.get(name):
                    to_serve[name] = None
        for name in to_serve:
            self._serve(name)

    def _serve(self, name: str) -> None:
        waiting = self._waiters.get(name)
        if not waiting:
            return
        group = self.groups[name]
        for waiter in list(waiting):
            if waiter.answer.done():
                waiting.remove(waiter)
                continue
            try:
                handed = self._hand_out(group, waiter)
            except NotifyError as refusal:
                # The storage's refusal concerns this poll alone, not the request that caused the others to be served.
                waiting.remove(waiter)
                waiter.answer.set_exception(refusal)
                continue
            if handed:
                waiting.remove(waiter)
                waiter.answer.set_result(handed)
            elif group.has_skipped:
                # It has looked at as many as may be looked at in one go: the next one's turn is first.
                waiting.remove(waiter)
                waiting.append(waiter)
                break
            elif group.turns.next() is None:
                break  # nothing for this one, nothing for the next
        if waiting:
            self._serve_on(group)

    def _serve_on(self, group: Group) -> None:
        """Where it has looked at many that it does not want: on with it, once others have had their turn."""
        if group.has_skipped and not group.is_to_be_served:
            group.is_to_be_served = True
            asyncio.get_running_loop().call_later(group.wait_seconds, self._go_on, group)

    def _go_on(self, group: Group) -> None:
        group.is_to_be_served = False
        if self.groups.get(group.name) is group:
            self._serve(group.name)

    async def settle(self, name: str, items: list[SettleItem], may: May | None = None) -> list[SettledItem]:
        """Settle receipts of a group; a receipt that is not the group's is stale. `may`: as for `receive`."""
        check_name("group", name)
        if not 0 < len(items) <= LIMITS.items:
            raise InvalidRequest(f"a request carries 1 to {LIMITS.items} items, this one {len(items)}", "out_of_bounds")
        group = self.groups.get(name)
        if group is None:
            raise NotFound(f"group {name!r} has no subscription")
        if self._instances.get(name):
            return await self._settle_by_instance(group, items, may)
        return await self._settle(group, items, may)

    async def _settle(self, group: Group, items: list[SettleItem], may: May | None) -> list[SettledItem]:
        try:
            return await group.settle(items, self._clock(), may)
        finally:
            self._schedule(group)
            self._serve(group.name)  # the next of a key, or room of its own, may be what somebody waits for

    async def _settle_by_instance(self, group: Group, items: list[SettleItem], may: May | None) -> list[SettledItem]:
        """Each item by the group whose lease its receipt is of; in request order."""
        by_group: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            lease_id = lease_of(item.receipt)
            holder = group.name if lease_id is None else self._holders.get(lease_id, group.name)
            if holder.partition("@")[0] != group.name:
                holder = group.name
            by_group.setdefault(holder, []).append(number)
        answered: dict[int, SettledItem] = {}
        for name, numbers in by_group.items():
            results = await self._settle(self.groups[name], [items[n] for n in numbers], may)
            answered.update(zip(numbers, results, strict=True))
        return [answered[number] for number in range(len(items))]

    # --- administration ---------------------------------------------------------------------------------------

    async def pause(self, name: str, paused: bool) -> None:
        """Stop handing out to a group, or go on. It stays so over restarts. Raises NotFound."""
        if name not in self.groups:
            raise NotFound(f"there is no group {name!r}")
        groups = [self.groups[name], *self._instances.get(name, [])]
        for group in groups:
            group.paused = paused
        await self._store.pause(name, paused)
        if not paused:
            for group in groups:
                self._serve(group.name)

    # --- time -------------------------------------------------------------------------------------------------

    def next_event_us(self) -> int | None:
        """When something happens without a request: a lease, a retry, a delayed message."""
        times = [self._events[0][0]] if self._events else []
        due_us = self._store.next_due_us()
        if due_us is not None:
            times.append(max(due_us, self._release_again_us))
        return min(times, default=None)

    async def tick(self) -> None:
        """Do what is due now. What the storage refuses for a while is tried again, and holds nothing else up."""
        now_us = self._clock()
        if now_us >= self._release_again_us:
            try:
                while self._store.release_due(now_us, RELEASE_BATCH) == RELEASE_BATCH:
                    await self._store.sync()
            except Unavailable:
                self._release_again_us = now_us + LOOK_AGAIN_US
        while self._events and self._events[0][0] <= now_us:
            due_us, _, group = heapq.heappop(self._events)
            if group.scheduled_us != due_us:
                continue  # it was looked at sooner, and has another time now
            group.scheduled_us = None
            if self.groups.get(group.name) is not group:
                continue
            try:
                group.expire(now_us)
            except Unavailable:
                pass  # these leases go on, and have a new time
            self._serve(group.name)
            self._schedule(group)
        if now_us - self._forgot_us > FORGET_EVERY_US:
            await self._forget_instances(now_us)


def _lease_ids() -> Iterator[int]:
    """Numbers that nobody can guess, since a receipt stands for the right to settle; and none is given twice, so that
    a receipt of an earlier run is stale."""
    while True:
        yield secrets.randbits(63)


SETTINGS = ("mode", "tags", "filter", "max_attempts", "retry_min_us", "retry_max_us")
"""The fields of a subscription that say what a group wants; the others say where it stands."""


def _settings(subscription: Subscription) -> dict[str, Any]:
    return {name: getattr(subscription, name) for name in SETTINGS}
