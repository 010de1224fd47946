"""The storage in memory as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from notify.protocol.large_bodies import mentioned
from notify.runtime.clock import Clock, wall_clock
from notify.storage.groups import Subscription
from notify.storage.memory.groups import MemoryGroups
from notify.storage.memory.queues import MemoryQueues
from notify.storage.memory.transactions import MemoryTransactions
from notify.storage.topics import Topic


@final
class MemoryStore:
    """Dictionaries and lists, with the methods of every storage. It exposes its parts' methods as its own."""

    def __init_subclass__(cls) -> None:
        raise TypeError("MemoryStore exposes the methods of its parts: an override in a subclass would be bypassed")

    def __init__(self, clock: Clock = wall_clock) -> None:
        """`clock`: the time of settlements, in microseconds since 1970."""
        self._queues = queues = MemoryQueues()
        self._groups = groups = MemoryGroups(queues, clock)
        self._transactions = transactions = MemoryTransactions(queues)

        # Exposed: TransactionStore.
        self.put = transactions.put
        self.decide = transactions.decide
        self.states = transactions.states
        self.producer_groups = transactions.producer_groups
        self.claim_checks = transactions.claim_checks
        self.release_checks = transactions.release_checks
        self.answer_check = transactions.answer_check
        self.checking = transactions.checking
        self.resume_checks = transactions.resume_checks
        self.half_contents = transactions.half_contents
        self.next_check_us = transactions.next_check_us
        self.transaction = transactions.transaction
        self.undecided = transactions.undecided
        self.in_doubt = transactions.in_doubt

        # Exposed: topics, and QueueStore.
        self.topics = queues.topics
        self.topic = queues.topic
        self.has_topic = queues.has_topic
        self.bounds = queues.bounds
        self.count = queues.count
        self.gaps = queues.gaps
        self.read = queues.read
        self.read_run = queues.read_run
        self.read_tagged = queues.read_tagged
        self.read_hashes = queues.read_hashes
        self.read_ids = queues.read_ids
        self.keyed = queues.keyed
        self.offset_at = queues.offset_at
        self.messages = queues.messages
        self.trim = queues.trim
        self.on_visible = queues.on_visible
        self.on_placed = queues.on_placed
        self.delayed = queues.delayed
        self.release_due = queues.release_due
        self.next_due_us = queues.next_due_us
        self.withdrawable = queues.withdrawals.withdrawable
        self.withdrawal = queues.withdrawals.withdrawal
        self.withdrawals = queues.withdrawals.withdrawals
        self.collapsed = queues.withdrawals.collapsed
        self.is_full_of_keys = queues.withdrawals.is_full_of_keys
        self.subscriptions = groups.subscriptions
        self.subscription = groups.subscription
        self.subscribe_soon = groups.subscribe_soon
        self.subscribe = groups.subscribe
        self.unsubscribe = groups.unsubscribe
        self.patterns = groups.patterns
        self.set_pattern = groups.set_pattern
        self.drop_pattern = groups.drop_pattern
        self.priorities = groups.priorities
        self.set_priorities = groups.set_priorities
        self.pause = groups.pause
        self.paused = groups.paused
        self.progress = groups.progress
        self.settle = groups.settle
        self.settle_soon = groups.settle_soon
        self.attempted = groups.attempted
        self.hold = groups.hold
        self.dead_letter_soon = groups.dead_letter_soon
        self.settlements = groups.settlements
        self.bridges = transactions.bridges
        self.bridge_base = transactions.bridge_base
        self.append_from_bridge = transactions.append_from_bridge

    async def open(self, now_us: int) -> None:
        """Do nothing: there is nothing to recover."""

    async def close(self) -> None:
        """Call no listener any more. The data is gone with the object."""
        self._queues.forget_listeners()

    async def stored_bodies(self, after: str) -> tuple[set[str], str]:
        """See NamesBodies. The first part has all names."""
        payloads = (*self._transactions.payloads(), *self._queues.payloads())
        return {name for payload in payloads for name in mentioned(payload)}, ""

    async def sync(self) -> None:
        """Do nothing: memory has no sync."""

    async def create_topic(self, topic: Topic) -> Topic:
        self.create_topic_soon(topic)
        return topic

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        self._queues.set_topic(topic)
        for subscription in followed_by:
            self._groups.subscribe_soon(subscription, [0] * topic.queues)

    async def delete_topic(self, name: str) -> None:
        self.delete_topic_soon(name)

    def delete_topic_soon(self, name: str) -> None:
        self._queues.drop_topic(name)
        self._groups.forget_topic(name)
