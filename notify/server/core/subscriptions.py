"""Makes and changes subscriptions for consumers and administrators, after it has checked what they ask for.

Delivery carries the change out; the routes check rights.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import structlog

from notify.admin_api.groups import SubscriptionWrite
from notify.errors import Conflict, InvalidRequest, NotFound
from notify.protocol.filter import Filter
from notify.protocol.limits import LIMITS, MODES, ON_EXHAUSTED, check_between, check_fair_by, check_name
from notify.protocol.wire import Subscribe, instant
from notify.runtime.clock import Clock
from notify.server.delivery import Delivery, inboxes
from notify.server.delivery.following import SETTINGS, asked_for
from notify.server.delivery.instances import ACTIVE_US
from notify.server.topics import check_retry
from notify.storage.groups import Subscription
from notify.storage.holds import HOLD
from notify.storage.names import retry_topic
from notify.storage.queues import Store

log = structlog.get_logger("notify.server")

ACTIVE_SECONDS = ACTIVE_US // 1_000_000
MOST_FRESH = 10_000
"""The most subscriptions that are remembered as made since the start and without a report of their inbox."""
MOST_CHANGED, MOST_CHANGES = 1_000, 50
"""The number of subscriptions whose last changes are remembered, and how many of each."""
CHANGES_SHOWN = 8
HOUR_US = 3_600_000_000
CHARACTERS_SHOWN = 60


class Changed(NamedTuple):
    """A change of a subscription's settings."""

    at_us: int
    by: str
    what: str


class Subscriptions:
    """The subscriptions of a server with queues. Methods belong to the event loop."""

    def __init__(self, queues: Store, delivery: Delivery, clock: Clock) -> None:
        self._queues = queues
        self._delivery = delivery
        self._clock = clock
        self._fresh: set[tuple[str, str]] = set()
        """(group, topic) of subscriptions made since the start: an inbox reported for one has missed no message yet."""
        self._changes: dict[tuple[str, str], deque[Changed]] = {}
        """The last changes by (group, topic)."""

    def checked(self, group: str, topic: str, request: Subscribe) -> Subscription:
        """The subscription that `request` asks for; a topic with `*` is a pattern.

        Raises InvalidRequest if a field is out of bounds, Conflict (`mode_in_use`) if consumers use another mode now.
        """
        is_pattern = "*" in topic
        check_name("group", group)
        check_name("topic", topic.replace("*", "x"))
        _check_bounds(request)
        for tag in request.tags:
            check_name("tag", tag)
        if request.filter:
            Filter(request.filter)
        wanted = Subscription(group, topic, **asked_for(request))
        existing = self._existing(group, topic)
        if existing is not None:
            wanted = dataclasses.replace(
                wanted, replay=existing.replay, last_replay=existing.last_replay,
                inbox_from_us=existing.inbox_from_us, earlier=existing.earlier,
            )  # fmt: skip
        wanted = inboxes.although(wanted, request.force)
        if not is_pattern:
            described = self._queues.topic(topic)
            check_retry(described.ttl_us if described is not None else 0, group, topic, wanted.retry_min_us)
        if existing is not None and existing.way != wanted.way and not request.force:
            self._refuse_other_way(existing, wanted)
        return wanted

    async def put(self, wanted: Subscription, start: str | int | None, by: str = "") -> dict[str, Any]:
        """Make or change a checked subscription; returns the routes' answer. Only a new subscription heeds `start`.

        `by`: who asks for it, for people.
        """
        existing = self._existing(wanted.group, wanted.topic)
        if existing is not None and (what := _difference(existing, wanted)):
            self._note_change((wanted.group, wanted.topic), Changed(self._clock(), by, what))
        if existing is None or dataclasses.replace(existing, epoch=0) != wanted:
            log.info("subscribed", group=wanted.group, topic=wanted.topic, mode=wanted.mode, is_new=existing is None)
        shown: dict[str, Any] = {"group": wanted.group, **way_shown(wanted)}
        if "*" in wanted.topic:
            names = await self._delivery.following.subscribe_pattern(wanted, start)
            return shown | {"pattern": wanted.topic, "topics": names[:1000]}
        is_new = existing is None
        made_topic = not self._queues.has_topic(wanted.topic)
        # The same request again must not move the group: only a reset does that.
        await self._delivery.following.subscribe(wanted, start if is_new else None)
        if is_new and len(self._fresh) < MOST_FRESH:
            self._fresh.add((wanted.group, wanted.topic))
        shown |= {"topic": wanted.topic, "is_new": is_new, "made_topic": made_topic}
        lags = self._delivery.followers.lag_of
        to_retry = lags(wanted.group, retry_topic(wanted.group, wanted.topic))  # redriven dead letters
        return shown | {"lag": lags(wanted.group, wanted.topic) + to_retry}

    def changes(self, group: str, topic: str) -> dict[str, Any]:
        """The last changes of a subscription since the server started, the latest first, and how many there were in the
        last hour (at most MOST_CHANGES): processes of two versions change it in turns."""
        noted = self._changes.get((group, topic), ())
        since_us = self._clock() - HOUR_US
        shown = [{"at": instant(c.at_us), "by": c.by, "what": c.what} for c in reversed(noted)]
        return {"changes": shown[:CHANGES_SHOWN], "changes_last_hour": sum([c.at_us > since_us for c in noted])}

    def _note_change(self, key: tuple[str, str], changed: Changed) -> None:
        noted = self._changes.pop(key, None) or deque(maxlen=MOST_CHANGES)
        if len(self._changes) >= MOST_CHANGED:
            del self._changes[next(iter(self._changes))]
        self._changes[key] = noted  # so that the first of all was changed the longest ago
        noted.append(changed)

    async def report_inbox(self, group: str, topic: str, from_us: int) -> None:
        """Note from which time on (microseconds) a group's inbox has a row for each message that took effect.

        Raises NotFound if the group has no such subscription or pattern, Conflict (`before_inbox`) if a new
        subscription starts before that time.
        """
        check_name("topic", topic.replace("*", "x"))  # rights know no wildcard but `*`
        existing = self._existing(group, topic)
        is_pattern = "*" in topic and existing is not None
        if is_pattern and existing is not None and from_us > existing.inbox_from_us:
            await self._queues.set_pattern(dataclasses.replace(existing, inbox_from_us=from_us))
        matching = [
            s for s in self._queues.subscriptions() if s.group == group and not s.of_topic and _matches(topic, s.topic)
        ]
        if not matching and not is_pattern:
            raise NotFound(f"group {group[:100]!r} has no subscription to {topic[:100]!r}")
        for name in [s.topic for s in matching]:
            s = self._queues.subscription(group, name)  # it may have changed during the wait for the one before
            if s is None:
                continue
            is_fresh = (s.group, s.topic) in self._fresh and not self._delivery.groups[group].instances
            self._fresh.discard((s.group, s.topic))
            whole_from_us = inboxes.whole_from(self._queues, s, from_us, self._clock(), is_fresh)
            if whole_from_us != s.inbox_from_us:
                await self._delivery.following.subscribe(dataclasses.replace(s, inbox_from_us=whole_from_us), None)

    def _existing(self, group: str, topic: str) -> Subscription | None:
        """A group's subscription to a topic, or its pattern; None if it has none."""
        if "*" in topic:
            return next((p for p in self._queues.patterns() if (p.group, p.topic) == (group, topic)), None)
        return self._queues.subscription(group, topic)

    def _refuse_other_way(self, existing: Subscription, wanted: Subscription) -> None:
        """Raises Conflict while the group has active consumers: all of them use one mode and `fair_by`, and a change
        would deliver messages to them again, or out of order."""
        group = self._delivery.groups.get(existing.group)
        groups = [*([] if group is None else [group]), *self._delivery.followers.instances_of(existing.group)]
        now_us = self._clock()
        active = {i.name for g in groups for i in g.instances.values() if now_us - i.asked_us < ACTIVE_US}
        active |= {
            lease.instance.name for g in groups for lease in g.leases.values() if lease.cursor.topic == existing.topic
        }
        if active:
            some = ", ".join(sorted(active)[:5])
            why = f"{some} asked for messages in the last {ACTIVE_SECONDS} s: stop its consumers, wait that long"
        elif self._delivery.following.may_come_back(existing.group):
            why = (
                f"this server started less than {ACTIVE_SECONDS} s ago, so that its consumers may be coming back: wait "
                "so long without them"
            )
        else:
            return
        raise Conflict(
            f"group {existing.group!r} receives topic {existing.topic!r} in {_way(existing)}, and {why}, then start "
            f"those with {_way(wanted)}; or change it now with force",
            "mode_in_use",
        )


def way_shown(s: Subscription) -> dict[str, Any]:
    """How a subscription hands out messages, for answers."""
    return {"mode": s.mode} | ({"fair_by": s.fair_by} if s.fair_by else {})


def _way(s: Subscription) -> str:
    """How a subscription hands out messages, for people."""
    return f"mode {s.mode}" + (f" and fair_by {s.fair_by}" if s.fair_by else "")


def _difference(before: Subscription, after: Subscription) -> str:
    """The settings that differ, for people; "" if none does."""
    parts = []
    for name in SETTINGS:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            if name.endswith("_us"):
                name, old, new = name[:-3], f"{old / 1e6:g} s", f"{new / 1e6:g} s"
            old, new = (", ".join(v) if isinstance(v, tuple) else v for v in (old, new))
            parts.append(f"{name} {str(old)[:CHARACTERS_SHOWN] or 'none'} → {str(new)[:CHARACTERS_SHOWN] or 'none'}")
    return ", ".join(parts)


_BOUNDS = {
    field.name: (bounds["ge"], bounds["le"])
    for field in dataclasses.fields(SubscriptionWrite)
    if "ge" in (bounds := field.metadata["of"])
}


def _check_bounds(request: Subscribe) -> None:
    if request.mode not in MODES:
        raise InvalidRequest(f"there is no mode {request.mode[:40]!r}; there are {', '.join(MODES)}", "invalid_schema")
    if request.on_exhausted not in ON_EXHAUSTED:
        raise InvalidRequest(
            f"on_exhausted is {' or '.join(ON_EXHAUSTED)}, not {request.on_exhausted[:40]!r}", "invalid_schema"
        )
    if request.on_exhausted == HOLD and request.mode != "ordered":
        raise InvalidRequest(
            f"on_exhausted hold needs mode ordered, where the messages of a key wait for each other; this is mode "
            f"{request.mode}",
            "invalid_schema",
        )
    check_fair_by(request.fair_by, request.mode)
    check_between("the number of tags", len(request.tags), 0, LIMITS.tags)
    for name, (low, high) in _BOUNDS.items():
        check_between(name, getattr(request, name), low, high)
    if request.retry_min > request.retry_max:
        raise InvalidRequest(
            f"retry_min {request.retry_min:g} is above retry_max {request.retry_max:g}", "out_of_bounds"
        )


def _matches(pattern: str, topic: str) -> bool:
    return pattern == topic or ("*" in pattern and fnmatchcase(topic, pattern))
