"""Consumer groups of the log: their subscriptions, and how their topics share deliveries."""

from __future__ import annotations

from collections.abc import Sequence

from notify.errors import NotFound
from notify.storage.groups import Priorities, Subscription
from notify.storage.log.journal import Journal
from notify.storage.log.meta import PatternDropped, PatternSet, PauseSet, PrioritiesSet, Subscribed, Unsubscribed
from notify.storage.log.state import LogState


class Groups:
    """Subscriptions, patterns, priorities and pauses, each change a META record."""

    def __init__(self, state: LogState, journal: Journal) -> None:
        self._state = state
        self._journal = journal

    def subscriptions(self) -> list[Subscription]:
        return list(self._state.subscriptions.values())

    def subscription(self, group: str, topic: str) -> Subscription | None:
        return self._state.subscriptions.get((group, topic))

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        if subscription.topic not in self._state.topics:
            raise NotFound(f"there is no topic {subscription.topic!r}")
        moved = None if offsets is None else list(offsets)
        self._journal.append_meta(Subscribed(subscription, moved))
        self._state.set_subscription(subscription, moved)

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        self.subscribe_soon(subscription, offsets)
        await self._journal.sync()
        return subscription

    async def unsubscribe(self, group: str, topic: str) -> None:
        subscription = self._state.subscriptions.get((group, topic))
        if subscription is None:
            raise NotFound(f"group {group!r} has no subscription to {topic!r}")
        ends = [queue.next_offset for queue in self._state.topics[topic].queues]
        self._journal.append_meta(Unsubscribed(group, topic, subscription, ends))
        self._state.drop_subscription(group, topic)
        await self._journal.sync()

    def patterns(self) -> list[Subscription]:
        return list(self._state.patterns.values())

    async def set_pattern(self, subscription: Subscription) -> None:
        self._journal.append_meta(PatternSet(subscription))
        self._state.patterns[(subscription.group, subscription.topic)] = subscription
        await self._journal.sync()

    async def drop_pattern(self, group: str, pattern: str) -> None:
        if (group, pattern) not in self._state.patterns:
            raise NotFound(f"group {group!r} does not subscribe to {pattern!r}")
        self._journal.append_meta(PatternDropped(group, pattern))
        del self._state.patterns[(group, pattern)]
        await self._journal.sync()

    def priorities(self, group: str) -> Priorities | None:
        return self._state.priorities.get(group)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        self._journal.append_meta(PrioritiesSet(group, priorities))
        self._state.priorities[group] = priorities
        await self._journal.sync()

    async def pause(self, group: str, paused: bool) -> None:
        self._journal.append_meta(PauseSet(group, paused))
        self._state.set_paused(group, paused)
        await self._journal.sync()

    def paused(self) -> frozenset[str]:
        return frozenset(self._state.paused)
