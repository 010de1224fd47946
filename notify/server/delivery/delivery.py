"""Delivery: consumer groups receive and settle messages, and leases, retries and delays come due."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence

from notify.errors import InvalidRequest, NotFound, Unavailable
from notify.protocol.limits import LIMITS, check_between, check_count, check_name
from notify.protocol.wire import Receive, SettledItem, SettleItem
from notify.runtime.clock import Clock
from notify.server.delivery.broadcast import INSTANCE_IDLE_US, Broadcasts
from notify.server.delivery.followers import Followers
from notify.server.delivery.following import Following
from notify.server.delivery.group import Group
from notify.server.delivery.leases import LOOK_AGAIN_US, Handed
from notify.server.delivery.receipts import lease_of
from notify.server.delivery.schedule import Schedule
from notify.server.delivery.waiters import May, Waiter, Waiters
from notify.server.metrics import Metrics
from notify.server.topics import Topics, is_meant
from notify.storage.capabilities import Placing
from notify.storage.queues import Store

RELEASE_BATCH = 5_000
RELEASE_SECONDS = 0.25
"""How long a tick releases delayed messages if more and more are due: leases, checks and health wait for its end."""
FORGET_EVERY_US = 60_000_000
_REQUEST_OF_SDK = re.compile(r"([0-9a-f]{12})\.[0-9]+").fullmatch


def _session_of(request_id: str) -> str:
    """The consumer of the SDK that has sent a request, by the request's name; "": a program of another kind."""
    named = _REQUEST_OF_SDK(request_id)
    return "" if named is None else str(named[1])


class Delivery:
    """Consumer groups over a storage. Call its methods on the event loop only."""

    def __init__(self, store: Store, clock: Clock, metrics: Metrics, topics: Topics) -> None:
        self._store = store
        self._clock = clock
        self._schedule = Schedule(clock)
        self.followers = Followers(store, clock, metrics, self._schedule)
        self.groups = self.followers.by_name
        self._waiters = Waiters(self.groups, self._schedule, clock, metrics)
        self.following = Following(store, topics, clock, self.followers, self._waiters)
        self._broadcasts = Broadcasts(store, self.followers, self.following, self._waiters)
        self._forgot_us = clock()
        self._release_again_us = 0
        self.is_releasing = False
        """Whether the last tick left delayed messages that were due to the next one."""
        self._to_queue = metrics.latencies["commit_to_queue"]
        store.on_visible(self.visible)
        if isinstance(store, Placing):
            store.on_placed(self.placed)

    async def receive(
        self,
        name: str,
        request: Receive,
        may: May | None = None,
        *,
        subscribes: bool = True,
        request_id: str = "",
        in_runs: bool = False,
    ) -> list[Handed]:
        """Messages for an instance of a group; waits up to `wait` seconds for the first.

        `may` tells whether the consumer may consume a topic, and is called whenever messages are handed out; None: it
        may consume every topic. A request that names patterns gets the topics of the group that match, also those that
        are made while it waits. With `subscribes` False this raises NotFound (`not_subscribed`) if the group has no
        subscription to one of the topics or patterns, or to any pattern if no topics are named: the consumer had
        subscribed, and this log has lost the subscription. A request whose `request_id` the instance has sent before
        gets that answer again, if its consumer has not settled any of it; "": it has none. `in_runs`: whether some of
        what is handed out may be runs.
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
            topics = frozenset(each for each in request.topics if "*" not in each)
            if subscribes:
                await self.following.subscribe_missing(name, [each for each in request.topics if each in topics])
            if len(topics) < len(frozenset(request.topics)):
                may = self._asked_by(name, topics, [each for each in request.topics if each not in topics], may)
                topics = None
        if not subscribes:
            self.following.refuse_lost(name, request.topics)
        group = self.groups.get(name)
        if group is not None and group.has_broadcast:
            name, topics = await self._broadcasts.group_for(name, request.instance, topics, may)
            group = self.groups.get(name)
        if group is None:
            if not self.following.has_pattern(name):
                raise NotFound(f"group {name!r} has no subscription; name its topics, or subscribe it first")
            group = self.followers.made(name)  # no topic matches its pattern yet
        now_us = self._clock()
        group.refuse_second(request.instance, topics, now_us, may)
        if session := _session_of(request_id):
            if name.endswith(f"@{request.instance}") and topics is not None:
                group.own_exclusively(request.instance, topics, now_us + round(request.lease * 1_000_000))
            if group.refuse_namesake(request.instance, session, topics, now_us, may):
                self._waiters.leave(name, request.instance)
        waiter = Waiter(request, topics, may, request_id, in_runs=in_runs)
        return await self._waiters.messages(group, waiter, request.wait)

    def _asked_by(self, group: str, names: Collection[str], patterns: Sequence[str], may: May | None) -> May:
        """Whether a request with these names and patterns asks for a topic of the group, and `may` consume it.

        No pattern asks for a broadcast topic, which is received by its name, in a request of its own.
        """
        matches: dict[str, bool] = {}
        """By topic, for this request."""

        def asks(topic: str) -> bool:
            if topic not in matches:
                is_matched = any(is_meant(pattern, topic) for pattern in patterns)
                matches[topic] = topic in names or (is_matched and self.mode_of(group, topic) != "broadcast")
            return matches[topic] and (may is None or may(topic))

        return asks

    def visible(self, topics: set[str]) -> None:
        """Serve the polls that wait for these topics, whose new messages have become durable."""
        to_serve: dict[str, None] = {}
        for topic in topics:
            for name in self.followers.by_topic.get(topic, ()):
                self.groups[name].wake(topic)
                if self._waiters.has(name):
                    to_serve[name] = None
        for name in to_serve:
            self._waiters.serve(name)

    def placed(self, committed_us: int, counts: Mapping[str, int]) -> None:
        """Count the time that messages took to their queues; see Placing."""
        us = self._clock() - committed_us
        for topic, count in counts.items():
            self._to_queue.of(topic).add(us, count)

    async def settle(self, name: str, items: list[SettleItem], may: May | None = None) -> list[SettledItem]:
        """Settle receipts of a group; another group's receipt is stale. `may`: as for `receive`."""
        check_name("group", name)
        check_count(items)
        group = self.groups.get(name)
        if group is None:
            raise NotFound(f"group {name!r} has no subscription")
        if self.followers.instances_of(name):
            return await self._settle_by_instance(group, items, may)
        return await self._settle(group, items, may)

    async def _settle(self, group: Group, items: list[SettleItem], may: May | None) -> list[SettledItem]:
        try:
            return await group.settle(items, self._clock(), may)
        finally:
            self._schedule.note(group)
            self._waiters.serve(group.name)  # a poll may wait for the next message of a key, or for room

    async def _settle_by_instance(self, group: Group, items: list[SettleItem], may: May | None) -> list[SettledItem]:
        """Settle each item in the instance's group that holds the receipt's lease; results are in request order."""
        by_group: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            lease_id = lease_of(item.receipt)
            holder = group.name if lease_id is None else self.followers.holders.get(lease_id, group.name)
            if holder.partition("@")[0] != group.name:
                holder = group.name
            by_group.setdefault(holder, []).append(number)
        answered: dict[int, SettledItem] = {}
        for name, numbers in by_group.items():
            results = await self._settle(self.groups[name], [items[n] for n in numbers], may)
            answered.update(zip(numbers, results, strict=True))
        return [answered[number] for number in range(len(items))]

    def leave(self, name: str, instance: str, may: May | None = None) -> None:
        """End the polls and the ownership of topics of an instance that stops; another may take them immediately.

        What it still holds counts as interrupted if its leases run out.

        `may`: as for `receive`.
        """
        check_name("group", name)
        for each in (name, f"{name}@{instance}"):  # the second one has its broadcast topics
            group = self.groups.get(each)
            if group is not None:
                self._waiters.leave(each, instance)
                group.leave(instance, may)
                self._waiters.serve(each)
                self._schedule.note(group)

    def mode_of(self, name: str, topic: str) -> str:
        """The mode in which a group receives a topic now; "" if it does not."""
        group = self.groups.get(name)
        cursor = None if group is None else group.cursors.get((topic, 0))
        return "" if cursor is None else cursor.subscription.mode

    def has_broadcast(self, name: str) -> bool:
        """Whether a group has a topic in mode broadcast."""
        group = self.groups.get(name)
        return group is not None and group.has_broadcast

    def give_back(self, name: str, handed: list[Handed]) -> None:
        """Return messages that did not reach their consumer: they are available now, and no attempt counts."""
        group = self.groups.get(name)
        if group is not None:
            group.give_back(handed, self._clock())
            self._waiters.serve(name)

    def dropped(self, topic: str) -> None:
        """Have the groups of a topic continue after the messages that were dropped from its queues."""
        for name in self.followers.by_topic.get(topic, ()):
            self.groups[name].dropped(topic)
            self._waiters.serve(name)

    def serve(self, name: str) -> None:
        """Serve the waiting polls of a group whose held keys were decided about."""
        self._waiters.serve(name)

    def set_rates(self, per_second: dict[str, float]) -> None:
        """Set the rates of groups, in messages a second; groups that are not named have no rate."""
        self.followers.set_rates(per_second)
        for name in list(self.groups):
            self._waiters.serve(name)

    async def pause(self, name: str, paused: bool) -> None:
        """Pause a group, or resume it. A pause outlasts restarts. Raises NotFound."""
        if name not in self.groups:
            raise NotFound(f"there is no group {name!r}")
        await self._store.pause(name, paused)
        groups = [self.groups[name], *self.followers.instances_of(name)]
        for group in groups:
            group.paused = paused
        if not paused:
            for group in groups:
                self._waiters.serve(group.name)

    def is_paused(self, name: str) -> bool:
        """Whether a group is paused."""
        group = self.groups.get(name)
        return group is not None and group.paused

    # --- time -------------------------------------------------------------------------------------------------

    def extend_leases(self, us: int) -> None:
        """Extend all leases and ownerships by `us` microseconds in which no renewal could be received."""
        for group in self.groups.values():
            group.extend_leases(us)
            self._schedule.note(group)

    def next_event_us(self) -> int | None:
        """When the next lease, retry or delayed message comes due; None if there is none."""
        scheduled_us, due_us = self._schedule.next_us(), self._store.next_due_us()
        if due_us is not None:
            due_us = max(due_us, self._release_again_us)
        return min((time_us for time_us in (scheduled_us, due_us) if time_us is not None), default=None)

    async def tick(self) -> None:
        """Act on what is due now. Changes that the storage refuses for now are tried again later; the rest
        continues."""
        now_us = self._clock()
        self.is_releasing = False
        if now_us >= self._release_again_us:
            try:
                await self._release_due(now_us)
            except Unavailable:
                self._release_again_us = now_us + LOOK_AGAIN_US
        for group in self._schedule.take_due(now_us):
            if self.groups.get(group.name) is not group:
                continue
            try:
                group.expire(now_us)
            except Unavailable:
                pass  # these leases stay, with a new time to look at them
            self._waiters.serve(group.name)
            self._schedule.note(group)
        if now_us - self._forgot_us > FORGET_EVERY_US:
            self._forgot_us = now_us
            for group in self.groups.values():
                if "@" not in group.name:
                    group.instances.forget(now_us - INSTANCE_IDLE_US)
            await self._broadcasts.forget_idle(now_us)

    async def _release_due(self, now_us: int) -> None:
        """Release delayed messages that are due, for RELEASE_SECONDS at most. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        until = loop.time() + RELEASE_SECONDS
        while self._store.release_due(now_us, RELEASE_BATCH) == RELEASE_BATCH:
            await self._store.sync()
            if loop.time() >= until:
                self.is_releasing = True
                return
