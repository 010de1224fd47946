"""Broadcasts: each instance of a group gets every message, as a separate group that begins with its first request."""

from __future__ import annotations

import dataclasses

from notify.errors import Conflict, InvalidRequest
from notify.server.delivery.followers import Followers
from notify.server.delivery.following import Following
from notify.server.delivery.waiters import May, Waiters
from notify.storage.queues import Store

INSTANCE_IDLE_US = 86_400_000_000
"""How long messages are kept for an instance of a broadcast that does not ask for any."""
MOST_BROADCAST_INSTANCES = 1_000
"""The most instances of a broadcasting group: messages are kept for each that asked within INSTANCE_IDLE_US."""


class Broadcasts:
    """Makes groups for instances, and forgets instances that have not asked for INSTANCE_IDLE_US."""

    def __init__(self, store: Store, followers: Followers, following: Following, waiters: Waiters) -> None:
        self._store = store
        self._followers = followers
        self._following = following
        self._waiters = waiters

    async def group_for(
        self, name: str, instance: str, topics: frozenset[str] | None, may: May | None
    ) -> tuple[str, frozenset[str] | None]:
        """(the group that serves an instance's request, its topics): broadcast topics have a group for each instance.

        `topics` None means all topics that the consumer `may` consume. Raises InvalidRequest if only some of the topics
        are broadcast.
        """
        modes = self._followers.by_name[name].modes()
        wanted = frozenset(t for t in modes if may is None or may(t)) if topics is None else topics
        broadcast = frozenset(topic for topic in wanted if modes.get(topic) == "broadcast")
        if not broadcast:
            return name, topics
        if broadcast != wanted:
            raise InvalidRequest(
                f"topics {', '.join(sorted(broadcast))} are broadcast in group {name!r}: receive them in a "
                "separate request",
                "mixed_modes",
            )
        own_group = f"{name}@{instance}"
        followed = self._followers.by_name[own_group].modes() if own_group in self._followers.by_name else {}
        if (
            own_group not in self._followers.by_name
            and len(self._followers.instances_of(name)) >= MOST_BROADCAST_INSTANCES
        ):
            raise Conflict(
                f"group {name!r} keeps messages for {MOST_BROADCAST_INSTANCES} instances already: give each consumer a "
                "name that stays the same over its starts (`instance`); one that asks for nothing is forgotten after "
                f"{INSTANCE_IDLE_US // 3_600_000_000} hours",
                "too_many_instances",
            )
        for topic in sorted(broadcast):
            if topic not in followed:
                of_group = self._store.subscription(name, topic)
                if of_group is None:
                    continue  # the subscription has ended during the wait for the disk
                await self._following.put(dataclasses.replace(of_group, group=own_group, mode="shared"), "latest")
        return own_group, broadcast

    async def forget_idle(self, now_us: int) -> None:
        """Stop keeping messages for instances that have not asked for INSTANCE_IDLE_US."""
        # Each `await` waits for the disk: meanwhile instances join, come back, or end their subscriptions.
        for group in self._followers.all_instances():
            if now_us - max(i.asked_us for i in group.instances.values()) > INSTANCE_IDLE_US and not group.leases:
                for topic in group.modes():
                    await self._following.end(group.name, topic)
                if not group.cursors:  # else it has come back meanwhile, and subscribed again
                    self._followers.drop_instance(group)
                    self._waiters.end(group.name)
