"""Counts what each consumer of a group asks for and finishes, and hence how much it may have in flight."""

from __future__ import annotations

HORIZON_SECONDS = 5.0
"""While others wait, an instance has at most what it finishes in this time."""
AT_LEAST = 32
UNKNOWN_RATE_BOUND = 2048
"""While nothing is known of its rate, an instance has AT_LEAST messages, and one more for each that it has finished."""
WINDOW_US = 1_000_000
WINDOW_MESSAGES = 1_000
SHORTEST_US = 1_000
ACTIVE_US = 60_000_000
"""An instance that asked for messages within this time is there."""
SLOW_SHARE = 0.25
MOST_BOUND = 10_000
"""A bound that has grown to more is none any more."""
MOST_BOUNDS = 1_000
"""Topics for which an instance has a bound; beyond it the oldest is forgotten."""
MOST_INSTANCES = 10_000
"""Names of consumers that are remembered although they do not ask any more."""


class Bound:
    """How much of one topic an instance may have in flight, after leases of that topic ran out."""

    __slots__ = ("in_flight", "most")

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.most = float(in_flight)

    def expire(self, count: int) -> None:
        """Leases of so many messages ran out: it loses half of the share that they were, in the end all but one."""
        held = max(1, self.in_flight)
        self.most = max(1.0, min(self.most, held) * (1 - min(count, held) / held / 2))
        self.in_flight = max(0, self.in_flight - count)

    @property
    def room(self) -> int:
        """Messages that it may be handed now: one at least, so that it can show that it works again."""
        return max(1, int(self.most) - self.in_flight)


class Instance:
    """One consumer of a group, as the server sees it."""

    __slots__ = (
        "_busy_since_us",
        "_busy_us",
        "_finished_in_window",
        "asked_us",
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
        self.seen_us = now_us
        """When it asked, settled or renewed last."""
        self.in_flight = 0
        self.finished = 0
        self.expired = 0
        self.expired_in_a_row = 0
        """Leases that ran out since it last finished something."""
        self.per_second: float | None = None
        """Messages it finishes in a second, averaged over some; None while nothing is known."""
        self.bounds: dict[str, Bound] = {}
        """By topic, where leases ran out. A bound grows with what the instance finishes of the topic."""
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
        """It has settled so many."""
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
        """Leases of `count` messages of a topic ran out, of `held` that it had of that topic."""
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
        """Its leases ended by no doing of its own."""
        self.in_flight = max(0, self.in_flight - count)
        if topic in self.bounds:
            bound = self.bounds[topic]
            bound.in_flight = max(0, bound.in_flight - count)

    def room(self, limit: int) -> int:
        """How many of `limit` messages it may be handed now that others ask, too.

        One that is alone may be handed all of them: nobody else could have what is kept from it.
        """
        if self.per_second is None:
            most = min(UNKNOWN_RATE_BOUND, AT_LEAST + self.finished)
        else:
            most = max(AT_LEAST, round(self.per_second * HORIZON_SECONDS))
        return max(0, min(limit, most - self.in_flight))

    def room_of(self, topic: str, limit: int) -> int:
        """How many of `limit` messages of one topic it may be handed now that others ask, too."""
        bound = self.bounds.get(topic)
        return limit if bound is None else min(limit, bound.room)

    @property
    def bound(self) -> int | None:
        """The smallest of its bounds; None where it has none."""
        return min([int(bound.most) for bound in self.bounds.values()], default=None)

    def state(self, fastest: float) -> str:
        """`stuck`: leases ran out since it last finished one; `slow`: far behind the group's fastest; else `ok`."""
        if self.expired_in_a_row:
            return "stuck"
        if self.in_flight and self.per_second is not None and self.per_second < fastest * SLOW_SHARE:
            return "slow"
        return "ok"


class Instances(dict[str, Instance]):
    """The consumers of a group that have asked for messages, by name."""

    def asking(self, name: str, now_us: int) -> Instance:
        """The one that asks now."""
        instance = self.get(name)
        if instance is None:
            if len(self) >= MOST_INSTANCES:
                self.forget(now_us - ACTIVE_US)
            instance = self[name] = Instance(name, now_us)
        instance.asked_us = instance.seen_us = now_us
        return instance

    def others_ask(self, instance: Instance, now_us: int) -> bool:
        """Whether another one than this has asked for something lately."""
        return any(now_us - i.asked_us < ACTIVE_US for i in self.values() if i is not instance)

    def forget(self, before_us: int) -> None:
        """Those that have not asked since then, and have nothing, are not listed any more."""
        for name in [name for name, i in self.items() if i.asked_us < before_us and not i.in_flight]:
            del self[name]


def states(instances: dict[str, Instance], now_us: int) -> dict[str, str]:
    """The state of each instance; `gone` for those that have neither asked nor settled nor renewed for a minute.

    Their leases go on: what they hold comes back when those run out.
    """
    rates = [i.per_second for i in instances.values() if i.per_second is not None]
    fastest = max(rates, default=0.0)
    return {name: "gone" if now_us - i.seen_us > ACTIVE_US else i.state(fastest) for name, i in instances.items()}
