"""Changes of what groups follow: subscriptions and patterns are made, changed and ended, in the storage and here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from notify.clock import Clock
from notify.errors import NotFound
from notify.limits import check_name
from notify.server.delivery.followers import Followers
from notify.server.delivery.instances import ACTIVE_US
from notify.server.delivery.start import Start, offset_of
from notify.server.topics import Topics, is_meant
from notify.storage.groups import Priorities, Subscription
from notify.storage.queues import Store
from notify.storage.topics import Topic


class Following:
    """Changes what groups follow, in the storage first."""

    def __init__(
        self, store: Store, topics: Topics, clock: Clock, followers: Followers, serve: Callable[[str], None]
    ) -> None:
        """`serve` hands out to those who wait for messages of a group. What the storage has is followed at once."""
        self._store = store
        self._topics = topics
        self._clock = clock
        self._followers = followers
        self._serve = serve
        for subscription in store.subscriptions():
            followers.follow(subscription, moved=True)
        self._recovered = frozenset(followers.by_name) | {pattern.group for pattern in store.patterns()}
        """Groups that were there before the start. Their consumers may come back, and are not known until then."""
        self._started_us = clock()
        topics.tell(self.topic_changed)

    def may_come_back(self, group: str) -> bool:
        """Whether consumers of a group may have asked shortly before this server started."""
        return group in self._recovered and self._clock() - self._started_us < ACTIVE_US

    async def subscribe(self, subscription: Subscription, start: Start | None) -> Subscription:
        """Make or change a subscription. `start` None leaves an existing position alone (new ones: latest)."""
        check_name("group", subscription.group)
        check_name("topic", subscription.topic)
        return await self.put(subscription, start)

    async def put(self, subscription: Subscription, start: Start | None) -> Subscription:
        """As `subscribe`, for names that are known to be good."""
        topic = self._store.topic(subscription.topic) or self._topics.put_soon(Topic(subscription.topic))
        known = self._store.subscription(subscription.group, subscription.topic)
        offsets: list[int] | None = None
        if start is not None or known is None:
            offsets = [self.offset_of(topic.name, queue, start or "latest") for queue in range(topic.queues)]
        elif known.epoch > subscription.epoch:
            subscription = dataclasses.replace(subscription, epoch=known.epoch)
        self._store.subscribe_soon(subscription, offsets)
        self._followers.follow(subscription, moved=offsets is not None)
        self._serve(subscription.group)
        await self._store.sync()
        return subscription

    def offset_of(self, topic: str, queue: int, start: Start) -> int:
        """The offset of a queue at which a subscription starts. Raises InvalidRequest for what is no such place."""
        return offset_of(self._store, topic, queue, start, self._clock())

    async def follow_retries(self, subscription: Subscription) -> None:
        """Hand a group, beside a topic of its own, what is sent to it again: from the first message on."""
        topic = self._store.topic(subscription.topic)
        assert topic is not None
        self._store.subscribe_soon(subscription, [0] * topic.queues)
        self._followers.follow(subscription, moved=True)
        await self._store.sync()

    async def reset(self, subscription: Subscription, to: Start) -> Subscription:
        """Move a group in a topic; what it has leased there is stale, and a new epoch begins."""
        moved = dataclasses.replace(subscription, epoch=subscription.epoch + 1)
        return await self.put(moved, to)

    async def subscribe_pattern(self, subscription: Subscription, start: Start | None) -> list[str]:
        """Subscribe to topics of a pattern, those to come from their first message on; the names of those there are."""
        names = [t.name for t in self._store.topics() if is_meant(subscription.topic, t.name)]
        self._change_followed(subscription, names)
        await self._store.set_pattern(subscription)
        for name in names:
            if self._store.subscription(subscription.group, name) is None:
                await self.put(dataclasses.replace(subscription, topic=name), start)
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
                self._followers.follow(changed, moved=False)
        self._serve(pattern.group)

    def has_pattern(self, group: str) -> bool:
        """Whether a group follows topics of a pattern, which may be still to come."""
        return any(pattern.group == group for pattern in self._store.patterns())

    def topic_changed(self, topic: Topic) -> None:
        """A topic was made, or has other queues: its groups follow them, and so do groups with a pattern for it."""
        for name in list(self._followers.by_topic.get(topic.name, ())):
            subscription = self._store.subscription(name, topic.name)
            if subscription is not None:
                self._followers.follow(subscription, moved=False)
        for pattern in self._store.patterns():
            if is_meant(pattern.topic, topic.name) and pattern.group not in self._followers.by_topic.get(
                topic.name, ()
            ):
                subscription = self._store.subscription(pattern.group, topic.name)
                if subscription is not None:  # made with the topic; a group may also have left one that is older
                    self._followers.follow(subscription, moved=True)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        """Other classes, weights or shares from now on."""
        await self._store.set_priorities(group, priorities)
        follower = self._followers.by_name.get(group)
        if follower is not None:
            follower.turns.change(priorities, follower.cursors.values())

    async def unsubscribe(self, group: str, topic: str) -> None:
        """Drop a subscription, and those of the instances it is broadcast to. Raises NotFound."""
        await self._store.unsubscribe(group, topic)
        self._followers.forget(group, topic)
        for instance in list(self._followers.instances_of(group)):
            if topic in instance.modes():
                await self.end(instance.name, topic)

    async def end(self, group: str, topic: str) -> None:
        """Drop a subscription, if nobody else has dropped it meanwhile."""
        with contextlib.suppress(NotFound):
            await self._store.unsubscribe(group, topic)
        self._followers.forget(group, topic)

    def refuse_lost(self, group: str, topics: Sequence[str] | None) -> None:
        """Raises NotFound where the group has no subscription to one of these topics; for None, to any pattern."""
        if topics is None:
            missing = [] if self.has_pattern(group) else ["a pattern"]
        else:
            missing = [f"topic {name!r}" for name in topics if self._store.subscription(group, name) is None]
        if missing:
            raise NotFound(f"group {group!r} has no subscription to {missing[0]}: subscribe it", "not_subscribed")

    async def subscribe_missing(self, group: str, topics: Sequence[str]) -> None:
        """Subscribe a group to those of these topics that it does not follow yet, from the latest message on."""
        known = (
            {topic for topic, _ in self._followers.by_name[group].cursors}
            if group in self._followers.by_name
            else set()
        )
        for name in topics:
            if name not in known:
                self._topics.use(name)
                await self.subscribe(Subscription(group, name), None)


SETTINGS = ("mode", "tags", "filter", "max_attempts", "retry_min_us", "retry_max_us")
"""The fields of a subscription that say what a group wants; the others say where it stands."""


def _settings(subscription: Subscription) -> dict[str, Any]:
    return {name: getattr(subscription, name) for name in SETTINGS}
