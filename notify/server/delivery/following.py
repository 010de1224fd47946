"""Makes, changes and ends subscriptions and patterns, in the storage and then in the groups."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from notify.admin_api.groups import SubscriptionWrite
from notify.errors import InvalidRequest, NotFound
from notify.protocol.limits import check_name
from notify.protocol.wire import Subscribe, microseconds
from notify.runtime.clock import Clock
from notify.server.delivery.followers import Followers
from notify.server.delivery.instances import ACTIVE_US
from notify.server.delivery.waiters import Waiters
from notify.server.topics import Topics, is_meant
from notify.storage.groups import Priorities, Subscription
from notify.storage.names import retry_topic
from notify.storage.queues import Store
from notify.storage.topics import Topic

Start = str | int | datetime


def offset_of(store: Store, topic: str, queue: int, start: Start, now_us: int) -> int:
    """The offset of a queue at which a subscription starts. Raises InvalidRequest if `start` is not a position."""
    first, end = store.bounds(topic, queue)
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
                f"start {text[:40]!r} is not earliest, latest, an offset or an RFC 3339 instant", "invalid_start"
            ) from None
    try:
        time_us = microseconds(start)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_start") from None
    if time_us > now_us:
        raise InvalidRequest(f"{start.isoformat()} is in the future; `latest` begins now", "out_of_bounds")
    return store.offset_at(topic, queue, time_us)


class Following:
    """Changes which topics groups follow, in the storage first."""

    def __init__(self, store: Store, topics: Topics, clock: Clock, followers: Followers, waiters: Waiters) -> None:
        """Groups follow their stored subscriptions from now on. `waiters`: their waiting polls."""
        self._store = store
        self._topics = topics
        self._clock = clock
        self._followers = followers
        self._waiters = waiters
        for subscription in store.subscriptions():
            followers.follow(subscription, moved=True)
        self._recovered = frozenset(followers.by_name) | {pattern.group for pattern in store.patterns()}
        """Groups from before the start. Their consumers may come back, and are unknown until then."""
        self._started_us = clock()
        topics.listen(self.topic_changed)

    def may_come_back(self, group: str) -> bool:
        """Whether this server started less than ACTIVE_US ago, and a group may have had active consumers then."""
        return group in self._recovered and self._clock() - self._started_us < ACTIVE_US

    async def subscribe(self, subscription: Subscription, start: Start | None) -> Subscription:
        """Make or change a subscription. `start` None keeps the position, or starts a new one at `latest`."""
        check_name("group", subscription.group)
        check_name("topic", subscription.topic)
        return await self.put(subscription, start)

    async def put(self, subscription: Subscription, start: Start | None) -> Subscription:
        """As `subscribe`, without checking the names."""
        topic = self._store.topic(subscription.topic) or self._topics.put_soon(Topic(subscription.topic))
        existing = self._store.subscription(subscription.group, subscription.topic)
        offsets: list[int] | None = None
        if start is not None or existing is None:
            offsets = [self.offset_of(topic.name, queue, start or "latest") for queue in range(topic.queues)]
        elif existing.epoch > subscription.epoch:
            subscription = dataclasses.replace(subscription, epoch=existing.epoch)
        if existing is not None:
            subscription = self._with_earlier(existing, subscription)
        self._store.subscribe_soon(subscription, offsets)
        self._followers.follow(subscription, moved=offsets is not None)
        self._change_made_from(subscription)
        self._waiters.serve(subscription.group)
        await self._store.sync()
        return subscription

    def _with_earlier(self, before: Subscription, after: Subscription) -> Subscription:
        """The subscription `after`, under which messages that wait keep the larger bounds of `before`."""
        earlier = before.earlier_than(self._clock(), after.max_attempts, after.max_deaths)
        return after if earlier == after.earlier else dataclasses.replace(after, earlier=earlier)

    def _change_made_from(self, subscription: Subscription) -> None:
        """Give a subscription's settings to the subscriptions that were made from it: those of a broadcast's instances,
        or the one to the retry topic."""
        s = subscription
        changes = _settings(s) | {"earlier": s.earlier}
        if s.mode == "broadcast":
            made = [self._store.subscription(i.name, s.topic) for i in self._followers.instances_of(s.group)]
            del changes["mode"]
            changes["inbox_from_us"] = s.inbox_from_us
        else:
            made = [self._store.subscription(s.group, retry_topic(s.group, s.topic))]
            del changes["tags"], changes["filter"]  # what is redriven to a retry topic is wanted
        for before in made:
            if before is not None and (changed := dataclasses.replace(before, **changes)) != before:
                self._store.subscribe_soon(changed, None)
                self._followers.follow(changed, moved=False)
                self._change_made_from(changed)  # an instance has a retry topic of its own
                self._waiters.serve(changed.group)

    def offset_of(self, topic: str, queue: int, start: Start) -> int:
        """The offset of a queue at which a subscription starts. Raises InvalidRequest if `start` is not a position."""
        return offset_of(self._store, topic, queue, start, self._clock())

    async def follow_retries(self, subscription: Subscription) -> None:
        """Have a group follow a retry topic, to which its dead letters are redriven, from the first message on."""
        topic = self._store.topic(subscription.topic)
        assert topic is not None
        self._store.subscribe_soon(subscription, [0] * topic.queues)
        self._followers.follow(subscription, moved=True)
        await self._store.sync()

    async def reset(self, subscription: Subscription, to: Start) -> Subscription:
        """Move a group in a topic; its leases there become stale, and a new epoch begins."""
        moved = dataclasses.replace(subscription, epoch=subscription.epoch + 1)
        return await self.put(moved, to)

    async def subscribe_pattern(self, subscription: Subscription, start: Start | None) -> list[str]:
        """Subscribe to a pattern's topics, future topics included, and return the names of the present ones.

        `start` holds for present topics; a future topic is received from its first message on.
        """
        names = [t.name for t in self._store.topics() if is_meant(subscription.topic, t.name)]
        self._change_followed(subscription, names)
        await self._store.set_pattern(subscription)
        for name in names:
            if self._store.subscription(subscription.group, name) is None:
                await self.put(dataclasses.replace(subscription, topic=name), start)
        return names

    def _change_followed(self, pattern: Subscription, names: Sequence[str]) -> None:
        """Give a pattern's new settings to the subscriptions that have its old settings.

        A subscription with other settings was made by the topic's name, and keeps them. Nothing is awaited here: if the
        storage refuses, the pattern is unchanged, and the same request can be sent again.
        """
        before = next((p for p in self._store.patterns() if (p.group, p.topic) == (pattern.group, pattern.topic)), None)
        if before is None or _settings(before) == _settings(pattern):
            return
        for name in names:
            followed = self._store.subscription(pattern.group, name)
            if followed is not None and _settings(followed) == _settings(before):
                changed = self._with_earlier(followed, dataclasses.replace(followed, **_settings(pattern)))
                self._store.subscribe_soon(changed, None)
                self._followers.follow(changed, moved=False)
                self._change_made_from(changed)
        self._waiters.serve(pattern.group)

    def has_pattern(self, group: str) -> bool:
        """Whether a group has a pattern, even one that matches no topic yet."""
        return any(pattern.group == group for pattern in self._store.patterns())

    def topic_changed(self, topic: Topic) -> None:
        """After a topic was made or got more queues, have its groups and those with a pattern for it follow it."""
        for name in list(self._followers.by_topic.get(topic.name, ())):
            subscription = self._store.subscription(name, topic.name)
            if subscription is not None:
                self._followers.follow(subscription, moved=False)
        for pattern in self._store.patterns():
            if is_meant(pattern.topic, topic.name) and pattern.group not in self._followers.by_topic.get(
                topic.name, ()
            ):
                subscription = self._store.subscription(pattern.group, topic.name)
                if subscription is not None:  # made with the topic; None if the group has left an older topic
                    self._followers.follow(subscription, moved=True)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        """Apply other classes, weights or shares from now on."""
        await self._store.set_priorities(group, priorities)
        follower = self._followers.by_name.get(group)
        for each in [] if follower is None else [follower, *self._followers.instances_of(group)]:
            each.turns.change(priorities, each.cursors.values())

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions. Raises NotFound."""
        self.delete_topic_soon(name)
        await self._store.sync()

    def delete_topic_soon(self, name: str) -> None:
        """`delete_topic` without the wait for the disk."""
        self._store.delete_topic_soon(name)
        for group in list(self._followers.by_topic.get(name, ())):
            self._forget(group, name)

    def _forget(self, group: str, topic: str) -> None:
        """Drop a subscription that the storage no longer has, and end the group's polls: consumers that continue ask
        again, and learn that they have to subscribe."""
        self._followers.forget(group, topic)
        self._waiters.end(group)

    async def unsubscribe(self, group: str, topic: str) -> None:
        """Drop a subscription, and those of its instances if it is broadcast. Raises NotFound."""
        await self._store.unsubscribe(group, topic)
        self._forget(group, topic)
        for instance in list(self._followers.instances_of(group)):
            if topic in instance.modes():
                await self.end(instance.name, topic)

    async def end(self, group: str, topic: str) -> None:
        """Drop a subscription, or nothing if it was dropped meanwhile."""
        with contextlib.suppress(NotFound):
            await self._store.unsubscribe(group, topic)
        self._forget(group, topic)

    def refuse_lost(self, group: str, topics: Sequence[str] | None) -> None:
        """Raises NotFound if the group has no subscription to one of `topics`, which may be patterns; for None, if it
        has no pattern."""
        if topics is None:
            missing = [] if self.has_pattern(group) else ["a pattern"]
        else:
            missing = [f"topic {name!r}" for name in topics if not self._is_subscribed(group, name)]
        if missing:
            raise NotFound(f"group {group!r} has no subscription to {missing[0]}: subscribe it", "not_subscribed")

    def _is_subscribed(self, group: str, name: str) -> bool:
        if "*" in name:
            return any((pattern.group, pattern.topic) == (group, name) for pattern in self._store.patterns())
        return self._store.subscription(group, name) is not None

    async def subscribe_missing(self, group: str, topics: Sequence[str]) -> None:
        """Subscribe a group, from the latest message on, to the topics that it does not follow yet."""
        followed = (
            {topic for topic, _ in self._followers.by_name[group].cursors}
            if group in self._followers.by_name
            else set()
        )
        for name in topics:
            if name not in followed:
                self._topics.use(name)
                await self.subscribe(Subscription(group, name), None)


SETTINGS = tuple(
    name
    for field in dataclasses.fields(SubscriptionWrite)
    for name in (field.name, f"{field.name}_us")
    if name in Subscription.__dataclass_fields__
)
"""The fields of a subscription that users set; the others are its progress."""
SETTINGS_SHOWN = tuple(name.removesuffix("_us") for name in SETTINGS)
"""Their names in requests and answers, where times are in seconds."""


def asked_for(request: Subscribe) -> dict[str, Any]:
    """The settings that a request asks for, as a subscription has them."""
    values = {name: getattr(request, name.removesuffix("_us")) for name in SETTINGS}
    return {
        name: round(value * 1e6) if name.endswith("_us") else tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def shown(subscription: Subscription) -> dict[str, Any]:
    """A subscription's settings as requests and answers have them."""
    return {
        name.removesuffix("_us"): value / 1e6 if name.endswith("_us") else list(value) if name == "tags" else value
        for name, value in _settings(subscription).items()
    }


def _settings(subscription: Subscription) -> dict[str, Any]:
    return {name: getattr(subscription, name) for name in SETTINGS}
