"""Counts what each consumer of a group finishes, which bounds how many messages it may have in flight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

HORIZON_SECONDS = 5.0
"""While others wait, an instance holds at most as many messages as it finishes in this time."""
AT_LEAST = 32
UNKNOWN_RATE_BOUND = 2048
"""Until its rate is known, an instance may hold AT_LEAST messages and one more for each finished one, up to this."""
WINDOW_US = 1_000_000
WINDOW_MESSAGES = 1_000
SHORTEST_US = 1_000
ACTIVE_US = 60_000_000
"""An instance that asked for messages within this time is active."""
SLOW_SHARE = 0.25
MOST_BOUND = 10_000
"""A bound that has grown beyond this is dropped."""
MOST_BOUNDS = 1_000
"""The most topics for which an instance has a bound; beyond it the oldest bound is dropped."""
MOST_INSTANCES = 10_000
"""The number of consumers from which on, for each new one, one that holds no messages is forgotten."""


class Bound:
    """How many messages of one topic an instance may have in flight, after leases of that topic expired."""

    __slots__ = ("in_flight", "most")

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.most = float(in_flight)

    def expire(self, count: int) -> None:
        """Shrink the bound after leases of `count` messages expired: by half of their share, down to 1."""
        held = max(1, self.in_flight)
        self.most = max(1.0, min(self.most, held) * (1 - min(count, held) / held / 2))
        self.in_flight = max(0, self.in_flight - count)

    @property
    def room(self) -> int:
        """How many messages the instance may get now: at least one, so that it can show that it works again."""
        return max(1, int(self.most) - self.in_flight)


class Instance:
    """One consumer of a group, as the server sees it."""

    __slots__ = (
        "__weakref__",
        "_busy_since_us",
        "_busy_us",
        "_finished_in_window",
        "answers",
        "asked_us",
        "asks",
        "bounds",
        "expired",
        "expired_in_a_row",
        "finished",
        "in_flight",
        "name",
        "per_second",
        "seen_us",
    )

    def __init__(self, name: str, now_us: int) -> None:
        self.name = name
        self.asked_us = now_us
        self.asks: Callable[[str], bool] | None = None
        """Whether its last request that named no topics asked for a topic of the group; None: for all of them."""
        self.seen_us = now_us
        """When it last asked, settled or renewed."""
        self.in_flight = 0
        self.finished = 0
        self.expired = 0
        self.expired_in_a_row = 0
        """Messages whose leases expired since it last finished one."""
        self.per_second: float | None = None
        """Messages that it finishes in a second, a moving average; None until it is known."""
        self.bounds: dict[str, Bound] = {}
        """Bounds by topic, if its leases expired. A bound grows with each message of the topic that is finished."""
        self.answers: dict[str, list[int]] = {}
        """The ids of the leases that it was given last, by the id of the request; see Answers."""
        self._busy_us = 0
        self._busy_since_us = now_us
        self._finished_in_window = 0

    def handed(self, topic: str, count: int, now_us: int) -> None:
        if not self.in_flight:
            self._busy_since_us = now_us  # idle time is not slowness
        self.in_flight += count
        if topic in self.bounds:
            self.bounds[topic].in_flight += count

    def finish(self, topic: str, count: int, now_us: int) -> None:
        """Count `count` messages of a topic that the instance has settled."""
        self.in_flight = max(0, self.in_flight - count)
        self.finished += count
        self.expired_in_a_row = 0
        self._finished_in_window += count
        if topic in self.bounds:
            bound = self.bounds[topic]
            bound.in_flight = max(0, bound.in_flight - count)
            bound.most += count
            if bound.most > MOST_BOUND:
                del self.bounds[topic]
        self.seen_us = now_us
        self._busy_us += max(0, now_us - self._busy_since_us)
        self._busy_since_us = now_us
        if self._busy_us >= WINDOW_US or self._finished_in_window >= WINDOW_MESSAGES:
            rate = self._finished_in_window * 1e6 / max(self._busy_us, SHORTEST_US)
            self.per_second = rate if self.per_second is None else 0.5 * (self.per_second + rate)
            self._busy_us = self._finished_in_window = 0

    def expire(self, topic: str, count: int, held: int) -> None:
        """Count expired leases of `count` messages of a topic, of which the instance held `held`."""
        bound = self.bounds.get(topic)
        if bound is None:
            if len(self.bounds) >= MOST_BOUNDS:
                del self.bounds[next(iter(self.bounds))]
            bound = self.bounds[topic] = Bound(held)
        bound.expire(count)
        self.in_flight = max(0, self.in_flight - count)
        self.expired += count
        self.expired_in_a_row += count

    def drop(self, topic: str, count: int) -> None:
        """Count messages whose leases the server ended, which is neither a finish nor an expiry."""
        self.in_flight = max(0, self.in_flight - count)
        if topic in self.bounds:
            bound = self.bounds[topic]
            bound.in_flight = max(0, bound.in_flight - count)

    def room(self, limit: int) -> int:
        """How many of `limit` messages the instance may get while others are active; one that is alone gets all."""
        if self.per_second is None:
            most = min(UNKNOWN_RATE_BOUND, AT_LEAST + self.finished)
        else:
            most = max(AT_LEAST, round(self.per_second * HORIZON_SECONDS))
        return max(0, min(limit, most - self.in_flight))

    def room_of(self, topic: str, limit: int) -> int:
        """How many of `limit` messages of one topic the instance may get while others are active."""
        bound = self.bounds.get(topic)
        return limit if bound is None else min(limit, bound.room)

    @property
    def bound(self) -> int | None:
        """The smallest of its bounds; None if it has none."""
        return min([int(bound.most) for bound in self.bounds.values()], default=None)

    def state(self, fastest: float) -> str:
        """`stuck`: leases expired since it last finished one; `slow`: its rate is far below `fastest`; else `ok`."""
        if self.expired_in_a_row:
            return "stuck"
        if self.in_flight and self.per_second is not None and self.per_second < fastest * SLOW_SHARE:
            return "slow"
        return "ok"


class Instances(dict[str, Instance]):
    """The consumers of a group that have asked for messages, by name."""

    def asking(self, name: str, now_us: int) -> Instance:
        """The instance of this name, which asks now; it is made if it does not exist."""
        instance = self.pop(name, None)
        if instance is None:
            if len(self) >= MOST_INSTANCES:
                self._forget_one()
            instance = Instance(name, now_us)
        self[name] = instance  # so that the first of all has asked the longest ago
        instance.asked_us = instance.seen_us = now_us
        return instance

    def others_ask(self, instance: Instance, now_us: int) -> bool:
        """Whether another instance is active."""
        return any(now_us - i.asked_us < ACTIVE_US for i in self.values() if i is not instance)

    def forget(self, before_us: int) -> None:
        """Forget instances that have not asked since `before_us`, and hold no messages."""
        for name in [name for name, i in self.items() if i.asked_us < before_us and not i.in_flight]:
            del self[name]

    def _forget_one(self) -> None:
        """Forget the instance that asked the longest ago, of those that hold no messages."""
        idle = next((name for name, i in self.items() if not i.in_flight), None)
        if idle is not None:
            del self[idle]


class Readers:
    """By topic of a group, an instance that asks for its messages. A topic can have none although the group has running
    consumers: a new version of the service has no handler for it any more."""

    __slots__ = ("_of_many", "_of_topic")

    def __init__(self) -> None:
        self._of_topic: dict[str, Instance] = {}
        self._of_many: weakref.WeakSet[Instance] = weakref.WeakSet()
        """Those that ask for all topics, or for those of patterns."""

    def note(
        self, instance: Instance, topics: Iterable[str] | None, now_us: int, asks: Callable[[str], bool] | None
    ) -> None:
        """Note that the instance asks for these topics of the group; None: for those that `asks` tells, or all."""
        if topics is None:
            instance.asks = asks
            self._of_many.add(instance)
            return
        for topic in topics:
            reader = self._of_topic.get(topic)
            if reader is not instance and not _is_active(reader, now_us):
                self._of_topic[topic] = instance

    def has(self, topic: str, now_us: int) -> bool:
        """Whether a running instance asks for the topic."""
        return _is_active(self._of_topic.get(topic), now_us) or any(
            _is_active(instance, now_us) and (instance.asks is None or instance.asks(topic))
            for instance in self._of_many
        )

    def forget(self, topic: str) -> None:
        """The group does not follow the topic any more."""
        self._of_topic.pop(topic, None)


def _is_active(instance: Instance | None, now_us: int) -> bool:
    return instance is not None and now_us - instance.seen_us <= ACTIVE_US


def states(instances: dict[str, Instance], now_us: int) -> dict[str, str]:
    """The state of each instance by name; `gone` if it has neither asked nor settled nor renewed for a minute.

    The leases of one that is gone still hold; its messages are delivered again when these expire.
    """
    rates = [i.per_second for i in instances.values() if i.per_second is not None]
    fastest = max(rates, default=0.0)
    return {name: "gone" if now_us - i.seen_us > ACTIVE_US else i.state(fastest) for name, i in instances.items()}
