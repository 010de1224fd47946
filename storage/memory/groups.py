"""Consumer groups: their subscriptions, their progress, and their settlements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from notify.errors import NotFound
from notify.runtime.clock import Clock
from notify.storage.groups import Priorities, SettleKind, Settlement, Subscription
from notify.storage.memory.queues import MemoryQueues
from notify.storage.names import dead_letter_topic
from notify.storage.progress import QueueProgress
from notify.storage.records import NewMessage, StoredMessage
from notify.storage.topics import Topic

SETTLEMENTS = 100_000
"""How many settlements are remembered for the timelines of messages."""


class MemoryGroups:
    """Dictionaries by group and topic."""

    def __init__(self, queues: MemoryQueues, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._paused: set[str] = set()
        self._patterns: dict[tuple[str, str], Subscription] = {}
        self._priorities: dict[str, Priorities] = {}
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._progress: dict[tuple[str, str, int], QueueProgress] = {}
        self._settlements: deque[tuple[str, int, int, int, Settlement]] = deque(maxlen=SETTLEMENTS)
        """(topic, queue, first offset, count, what was done)."""

    def subscriptions(self) -> list[Subscription]:
        return list(self._subscriptions.values())

    def subscription(self, group: str, topic: str) -> Subscription | None:
        return self._subscriptions.get((group, topic))

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        if not self._queues.has_topic(subscription.topic):
            raise NotFound(f"there is no topic {subscription.topic!r}")
        self._subscriptions[(subscription.group, subscription.topic)] = subscription
        for queue, offset in enumerate(offsets or ()):
            self._progress[(subscription.group, subscription.topic, queue)] = QueueProgress(offset)

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        self.subscribe_soon(subscription, offsets)
        return subscription

    async def unsubscribe(self, group: str, topic: str) -> None:
        self._unsubscribe(group, topic)

    def _unsubscribe(self, group: str, topic: str) -> None:
        if self._subscriptions.pop((group, topic), None) is None:
            raise NotFound(f"group {group!r} has no subscription to {topic!r}")
        if not any(key[0] == group for key in self._subscriptions):
            self._paused.discard(group)
        for key in [key for key in self._progress if key[:2] == (group, topic)]:
            del self._progress[key]

    def patterns(self) -> list[Subscription]:
        return list(self._patterns.values())

    async def set_pattern(self, subscription: Subscription) -> None:
        self._patterns[(subscription.group, subscription.topic)] = subscription

    async def drop_pattern(self, group: str, pattern: str) -> None:
        if self._patterns.pop((group, pattern), None) is None:
            raise NotFound(f"group {group!r} does not subscribe to {pattern!r}")

    def priorities(self, group: str) -> Priorities | None:
        return self._priorities.get(group)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        self._priorities[group] = priorities

    async def pause(self, group: str, paused: bool) -> None:
        if paused:
            self._paused.add(group)
        else:
            self._paused.discard(group)

    def paused(self) -> frozenset[str]:
        return frozenset(self._paused)

    def forget_topic(self, name: str) -> None:
        """Drop the subscriptions to a deleted topic."""
        for group, topic in list(self._subscriptions):
            if topic == name:
                self._unsubscribe(group, topic)

    # --- progress ---------------------------------------------------------------------------------------------

    def progress(self, group: str, topic: str, queue: int) -> QueueProgress:
        self._queues.bounds(topic, queue)  # raises NotFound
        return self._progress.setdefault((group, topic, queue), QueueProgress())

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        self.settle_soon(group, topic, queue, list(runs), kind)

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        now_us = self._clock()
        for first, count in runs:
            self.progress(group, topic, queue).settle(first, count)
            self._settlements.append((topic, queue, first, count, Settlement(group, kind, now_us)))

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, ...]]) -> None:
        self.hold(group, topic, queue, offsets, ())

    def hold(
        self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, ...]], reasons: Sequence[str]
    ) -> None:
        now_us = self._clock()
        self.progress(group, topic, queue).again(offsets, reasons)
        for attempt in offsets:
            settlement = Settlement.of_attempt(group, now_us, attempt)
            if settlement is not None:
                self._settlements.append((topic, queue, attempt[0], 1, settlement))

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        own = [
            settlement
            for of_topic, of_queue, first, count, settlement in self._settlements
            if (of_topic, of_queue) == (topic, queue) and first <= offset < first + count
        ]
        return own, len(self._settlements) < SETTLEMENTS

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        name = dead_letter_topic(group)
        if not self._queues.has_topic(name):
            self._queues.set_topic(Topic(name))
        for message, payload in messages:
            self.settle_soon(group, message.topic, message.queue, [(message.offset, 1)], SettleKind.DEAD_LETTER)
            letter = NewMessage(name, payload)
            self._queues.enqueue(letter, 0, message.transaction_id, message.message_no, now_us)
        self._queues.tell({name})
