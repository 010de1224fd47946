"""Broadcasts: every instance of a group gets every message, by a group of its own, from when it first asks."""

from __future__ import annotations

import dataclasses

from notify.errors import Conflict, InvalidRequest
from notify.server.delivery.followers import Followers
from notify.server.delivery.following import Following
from notify.server.delivery.waiters import May, Waiters
from notify.storage.queues import Store

INSTANCE_IDLE_US = 86_400_000_000
"""How long messages are kept for an instance of a broadcast that asks for none."""
MOST_BROADCAST_INSTANCES = 1_000
"""The most instances of a broadcasting group: messages are kept for each that asked within INSTANCE_IDLE_US."""


class Broadcasts:
    """Makes groups for instances, and forgets those that have not asked for long."""

    def __init__(self, store: Store, followers: Followers, following: Following, waiters: Waiters) -> None:
        self._store = store
        self._followers = followers
        self._following = following
        self._waiters = waiters

    async def group_for(
        self, name: str, instance: str, topics: frozenset[str] | None, may: May | None
    ) -> tuple[str, frozenset[str] | None]:
        """Where topics are broadcast, the group that is this instance alone: it begins when it first asks.

        Without `topics` those are meant that who asks `may` consume. Raises InvalidRequest for a request over topics of
        which only some are broadcast.
        """
        modes = self._followers.by_name[name].modes()
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
        known = self._followers.by_name[own].modes() if own in self._followers.by_name else {}
        if own not in self._followers.by_name and len(self._followers.instances_of(name)) >= MOST_BROADCAST_INSTANCES:
            raise Conflict(
                f"group {name!r} keeps messages for {MOST_BROADCAST_INSTANCES} instances already: give each consumer a "
                "name that stays the same over its starts (`instance`); one that asks for nothing is forgotten after "
                f"{INSTANCE_IDLE_US // 3_600_000_000} hours",
                "too_many_instances",
            )
        for topic in sorted(broadcast):
            if topic not in known:
                of_group = self._store.subscription(name, topic)
                if of_group is None:
                    continue  # it has ended while the disk was waited for
                await self._following.put(dataclasses.replace(of_group, group=own, mode="shared"), "latest")
        return own, broadcast

    async def forget_idle(self, now_us: int) -> None:
        """Instances that have not asked for long get no more messages kept for them."""
        # Meanwhile the disk is waited for, and others join, come back, or end their subscriptions.
        for group in self._followers.all_instances():
            if now_us - max(i.asked_us for i in group.instances.values()) > INSTANCE_IDLE_US and not group.leases:
                for topic in group.modes():
                    await self._following.end(group.name, topic)
                self._followers.drop_instance(group)
                self._waiters.end(group.name)
