"""Subscriptions as consumers and administrators ask for them: what is checked before one is made or changed.

Delivery carries out what was checked here; rights are asked by the routes.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

import structlog

from notify.clock import Clock
from notify.errors import Conflict, InvalidRequest, NotFound
from notify.filter import Filter
from notify.limits import LIMITS, MODES, check_between, check_name
from notify.server.delivery import Delivery, inboxes
from notify.server.delivery.instances import ACTIVE_US
from notify.server.topics import check_retry
from notify.storage.groups import Subscription
from notify.storage.names import retry_topic
from notify.storage.queues import Store
from notify.wire import Subscribe

log = structlog.get_logger("notify.server")

ACTIVE_SECONDS = ACTIVE_US // 1_000_000
MOST_FRESH = 10_000
"""Subscriptions made since the start of whose inbox nobody has told yet."""


class Subscriptions:
    """The subscriptions of a server with queues. Methods belong to the event loop."""

    def __init__(self, queues: Store, delivery: Delivery, clock: Clock) -> None:
        self._queues = queues
        self._delivery = delivery
        self._clock = clock
        self._fresh: set[tuple[str, str]] = set()
        """Group and topic of those that were made since the start; an inbox that is told of has missed nothing yet."""

    def checked(self, group: str, topic: str, asked: Subscribe) -> Subscription:
        """The subscription that is asked for; a topic with `*` is a pattern.

        Raises InvalidRequest for what cannot be, Conflict (`mode_in_use`) for another mode than consumers use now.
        """
        is_pattern = "*" in topic
        check_name("group", group)
        check_name("topic", topic.replace("*", "x"))
        _check_bounds(asked)
        for tag in asked.tags:
            check_name("tag", tag)
        if asked.filter:
            Filter(asked.filter)
        wanted = Subscription(
            group,
            topic,
            asked.mode,
            tuple(asked.tags),
            asked.max_attempts,
            round(asked.retry_min * 1e6),
            round(asked.retry_max * 1e6),
            asked.filter,
        )
        known = self._known(group, topic)
        if known is not None:
            wanted = dataclasses.replace(
                wanted, replay=known.replay, last_replay=known.last_replay, inbox_from_us=known.inbox_from_us
            )
        wanted = inboxes.although(wanted, asked.force)
        if not is_pattern:
            described = self._queues.topic(topic)
            check_retry(described.ttl_us if described is not None else 0, group, topic, wanted.retry_min_us)
        if known is not None and known.mode != wanted.mode and not asked.force:
            self._refuse_change_of_mode(known, wanted.mode)
        return wanted

    async def put(self, wanted: Subscription, start: str | int | None) -> dict[str, Any]:
        """Make or change a checked subscription; what the routes answer. `start` counts for a new one alone."""
        known = self._known(wanted.group, wanted.topic)
        if known is None or dataclasses.replace(known, epoch=0) != wanted:
            log.info("subscribed", group=wanted.group, topic=wanted.topic, mode=wanted.mode, is_new=known is None)
        shown: dict[str, Any] = {"group": wanted.group, "mode": wanted.mode}
        if "*" in wanted.topic:
            names = await self._delivery.following.subscribe_pattern(wanted, start)
            return shown | {"pattern": wanted.topic, "topics": names[:1000]}
        is_new = known is None
        made_topic = not self._queues.has_topic(wanted.topic)
        # Sending the same again must not move the group: that is a reset.
        await self._delivery.following.subscribe(wanted, start if is_new else None)
        if is_new and len(self._fresh) < MOST_FRESH:
            self._fresh.add((wanted.group, wanted.topic))
        shown |= {"topic": wanted.topic, "is_new": is_new, "made_topic": made_topic}
        lags = self._delivery.followers.lag_of
        again = lags(wanted.group, retry_topic(wanted.group, wanted.topic))  # dead letters that were sent again
        return shown | {"lag": lags(wanted.group, wanted.topic) + again}

    async def tell_inbox(self, group: str, topic: str, from_us: int) -> None:
        """Note from when on (microseconds) the inbox of a group has a row for each message that took effect.

        Raises NotFound where the group has no such subscription or pattern, Conflict (`before_inbox`) for a new
        subscription that starts before that.
        """
        check_name("topic", topic.replace("*", "x"))  # a right is asked for `*` alone: fnmatch knows more than that
        known = self._known(group, topic)
        is_pattern = "*" in topic and known is not None
        if is_pattern and known is not None and from_us > known.inbox_from_us:
            await self._queues.set_pattern(dataclasses.replace(known, inbox_from_us=from_us))
        meant = [
            s for s in self._queues.subscriptions() if s.group == group and not s.of_topic and _is_meant(topic, s.topic)
        ]
        if not meant and not is_pattern:
            raise NotFound(f"group {group[:100]!r} has no subscription to {topic[:100]!r}")
        for s in meant:
            is_fresh = (s.group, s.topic) in self._fresh and not self._delivery.groups[group].instances
            self._fresh.discard((s.group, s.topic))
            whole_from_us = inboxes.whole_from(self._queues, s, from_us, self._clock(), is_fresh)
            if whole_from_us != s.inbox_from_us:
                await self._delivery.following.subscribe(dataclasses.replace(s, inbox_from_us=whole_from_us), None)

    def _known(self, group: str, topic: str) -> Subscription | None:
        """The subscription to a topic, or the pattern."""
        if "*" in topic:
            return next((p for p in self._queues.patterns() if (p.group, p.topic) == (group, topic)), None)
        return self._queues.subscription(group, topic)

    def _refuse_change_of_mode(self, known: Subscription, mode: str) -> None:
        """Raises Conflict while consumers of the group are there: one mode holds for all of them, and another would
        give them messages again, or out of their order."""
        group = self._delivery.groups.get(known.group)
        groups = [*([] if group is None else [group]), *self._delivery.followers.instances_of(known.group)]
        now_us = self._clock()
        active = {i.name for g in groups for i in g.instances.values() if now_us - i.asked_us < ACTIVE_US}
        active |= {
            lease.instance.name for g in groups for lease in g.leases.values() if lease.cursor.topic == known.topic
        }
        if active:
            names = ", ".join(sorted(active)[:5])
            why = f"{names} asked for messages in the last {ACTIVE_SECONDS} s: stop the group's consumers, wait so long"
        elif self._delivery.following.may_come_back(known.group):
            why = (
                f"this server started less than {ACTIVE_SECONDS} s ago, so that its consumers may be coming back: wait "
                "so long without them"
            )
        else:
            return
        raise Conflict(
            f"group {known.group!r} receives topic {known.topic!r} in mode {known.mode}, and {why}, then start "
            f"those with mode {mode}; or change it at once with force",
            "mode_in_use",
        )


def _check_bounds(asked: Subscribe) -> None:
    if asked.mode not in MODES:
        raise InvalidRequest(f"there is no mode {asked.mode[:40]!r}; there are {', '.join(MODES)}", "invalid_schema")
    check_between("the number of tags", len(asked.tags), 0, LIMITS.tags)
    check_between("max_attempts", asked.max_attempts, 1, LIMITS.attempts)
    check_between("retry_min", asked.retry_min, LIMITS.retry_min_seconds, LIMITS.retry_first_seconds)
    check_between("retry_max", asked.retry_max, LIMITS.retry_min_seconds, LIMITS.retry_max_seconds)
    if asked.retry_min > asked.retry_max:
        raise InvalidRequest(f"retry_min {asked.retry_min:g} is above retry_max {asked.retry_max:g}", "out_of_bounds")


def _is_meant(pattern: str, topic: str) -> bool:
    return pattern == topic or ("*" in pattern and fnmatchcase(topic, pattern))
