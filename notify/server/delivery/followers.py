"""All groups of a server, and the topics that each of them follows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from notify.runtime.clock import Clock
from notify.server.delivery.ack_memory import AckMemory
from notify.server.delivery.group import Group
from notify.server.delivery.instances import Instance
from notify.server.delivery.pace import Pace
from notify.server.delivery.schedule import Schedule
from notify.server.metrics import Metrics
from notify.server.rate import TokenBucket
from notify.storage.groups import Subscription
from notify.storage.queues import Store


class Followers:
    """The groups of a server by name, and by topic. Each instance of a broadcasting group is a separate group, named
    `group@instance`."""

    def __init__(self, store: Store, clock: Clock, metrics: Metrics, schedule: Schedule) -> None:
        self.by_name: dict[str, Group] = {}
        self.by_topic: dict[str, set[str]] = {}
        """The names of the groups that follow a topic."""
        self.holders: dict[int, str] = {}
        """The group `group@instance` of each lease of a broadcast, by the lease's id."""
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._schedule = schedule
        self._pace = Pace(metrics, clock())
        self.recent = AckMemory(clock())
        self._rates: dict[str, TokenBucket] = {}
        self._instances: dict[str, list[Group]] = {}
        """The instances of each broadcasting group."""
        self._lease_ids = _lease_ids()

    def made(self, name: str) -> Group:
        """The group of a name; it is made if it does not exist."""
        group = self.by_name.get(name)
        if group is None:
            base, _, instance = name.partition("@")
            holders = self.holders if instance else None
            group = Group(name, self._store, self._metrics, self._lease_ids, self._pace, self.recent, holders)
            group.paused = base in self._store.paused()
            group.rate = self._rates.get(base)
            self.by_name[name] = group
            if instance:
                group.instances[instance] = Instance(instance, self._clock())
                self._instances.setdefault(base, []).append(group)
        return group

    def follow(self, subscription: Subscription, moved: bool) -> None:
        """Have a group follow a topic; with `moved` it continues at its progress in the storage."""
        group = self.made(subscription.group)
        topic = self._store.topic(subscription.topic)
        assert topic is not None
        group.subscribe(subscription, topic.queues, moved)
        self.by_topic.setdefault(subscription.topic, set()).add(subscription.group)
        self._schedule.note(group)

    def forget(self, group: str, topic: str) -> None:
        """Drop a subscription that the storage no longer has."""
        if group in self.by_name:
            self.by_name[group].unsubscribe(topic)
        names = self.by_topic.get(topic, set())
        names.discard(group)
        if not names:
            self.by_topic.pop(topic, None)

    def instances_of(self, group: str) -> list[Group]:
        """The instances of a broadcasting group; empty for another group."""
        return self._instances.get(group, [])

    def all_instances(self) -> list[Group]:
        """The instances of all broadcasting groups."""
        return [group for instances in self._instances.values() for group in instances]

    def drop_instance(self, group: Group) -> None:
        """Forget an instance of a broadcast; if it comes back, it begins as a new instance."""
        instances = self._instances.get(group.name.partition("@")[0], [])
        if group in instances:
            instances.remove(group)
        self.by_name.pop(group.name, None)

    def set_rates(self, per_second: dict[str, float]) -> None:
        """Set the rates of groups, in messages a second; groups that are not named have no rate."""
        now_us = self._clock()
        self._rates = {group: TokenBucket(rate, now_us) for group, rate in per_second.items()}
        for group in self.by_name.values():
            group.rate = self._rates.get(group.name.partition("@")[0])

    def lag(self, topic: str) -> int:
        """The lag of the slowest group of a topic, in messages; 0 if no group subscribes to it."""
        return max((self.lag_of(group, topic) for group in self.by_topic.get(topic, ())), default=0)

    def subscriptions_of(self, topic: str) -> list[tuple[Subscription, int]]:
        """The subscriptions to a topic, each with its group's lag in messages."""
        subscriptions = []
        for name in sorted(self.by_topic.get(topic, ())):
            cursor = self.by_name[name].cursors.get((topic, 0))
            if cursor is not None:
                subscriptions.append((cursor.subscription, self.lag_of(name, topic)))
        return subscriptions

    def floor(self, topic: str, queue: int) -> int | None:
        """The offset of a queue below which all groups have settled all messages; None if no group subscribes."""
        cursors = [self.by_name[name].cursors.get((topic, queue)) for name in self.by_topic.get(topic, ())]
        floors = [c.progress.floor for c in cursors if c is not None and c.subscription.mode != "broadcast"]
        return min(floors, default=None)

    def lag_of(self, name: str, topic: str) -> int:
        """A group's lag in a topic, in messages."""
        cursors = self.by_name[name].cursors
        lag = queue = 0
        while (cursor := cursors.get((topic, queue))) is not None:
            lag += cursor.lag()
            queue += 1
        return lag


def _lease_ids() -> Iterator[int]:
    """Random ids of leases. Nobody can guess a receipt, which gives the right to settle. No id is used twice, so that a
    receipt from before a restart is stale."""
    while True:
        yield secrets.randbits(63)
