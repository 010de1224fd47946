"""Counts what each consumer of a group asks for and finishes, and hence how much it may have in flight."""

from __future__ import annotations

HORIZON_SECONDS = 5.0
"""While others wait, an instance has at most what it finishes in this time."""
AT_LEAST = 32
UNKNOWN_RATE_BOUND = 2048
WINDOW_US = 1_000_000
WINDOW_MESSAGES = 1_000
SHORTEST_US = 1_000
ACTIVE_US = 60_000_000
"""An instance that asked for messages within this time is there."""
SLOW_SHARE = 0.25
MOST_INSTANCES = 10_000
"""Names of consumers that are remembered although they do not ask any more."""


class Instance:
    """One consumer of a group, as the server sees it."""

    __slots__ = (
        "_busy_since_us",
        "_busy_us",
        "_finished_in_window",
        "asked_us",
        "bound",
        "expired",
        "expired_in_a_row",
        "finished",
        "in_flight",
        "name",
        "per_second",
    )

    def __init__(self, name: str, now_us: int) -> None:
        self.name = name
        self.asked_us = now_us
        self.in_flight = 0
        self.finished = 0
        self.expired = 0
        self.expired_in_a_row = 0
        """Leases that ran out since it last finished something."""
        self.per_second: float | None = None
        """Messages it finishes in a second, averaged over some; None while nothing is known."""
        self.bound: int | None = None
        """After leases ran out: how many it may have in flight. It grows with what it finishes."""
        self._busy_us = 0
        self._busy_since_us = now_us
        self._finished_in_window = 0

    def handed(self, count: int, now_us: int) -> None:
        if not self.in_flight:
            self._busy_since_us = now_us  # idle time is not slowness
        self.in_flight += count

    def finish(self, count: int, now_us: int) -> None:
        """It has settled so many."""
        self.in_flight = max(0, self.in_flight - count)
        self.finished += count
        self.expired_in_a_row = 0
        self._finished_in_window += count
        if self.bound is not None:
            self.bound += count
            if self.bound > 10_000:
                self.bound = None
        self._busy_us += max(0, now_us - self._busy_since_us)
        self._busy_since_us = now_us
        if self._busy_us >= WINDOW_US or self._finished_in_window >= WINDOW_MESSAGES:
            rate = self._finished_in_window * 1e6 / max(self._busy_us, SHORTEST_US)
            self.per_second = rate if self.per_second is None else 0.5 * (self.per_second + rate)
            self._busy_us = self._finished_in_window = 0

    def expire(self, count: int) -> None:
        """Leases of so many messages ran out: it gets half of what it had, in the end one at a time."""
        self.bound = max(1, (self.in_flight if self.bound is None else min(self.bound, self.in_flight)) // 2)
        self.in_flight = max(0, self.in_flight - count)
        self.expired += count
        self.expired_in_a_row += count

    def drop(self, count: int) -> None:
        """Its leases ended by no doing of its own."""
        self.in_flight = max(0, self.in_flight - count)

    def room(self, limit: int) -> int:
        """How many of `limit` messages it may be handed now that others ask, too: at least one unless it is slow.

        One that is alone may be handed all of them: nobody else could have what is kept from it.
        """
        if self.bound is not None:
            limit = min(limit, max(1, self.bound - self.in_flight))
        if self.per_second is None:
            most = UNKNOWN_RATE_BOUND
        else:
            most = max(AT_LEAST, round(self.per_second * HORIZON_SECONDS))
        return max(0, min(limit, most - self.in_flight))

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
        instance.asked_us = now_us
        return instance

    def others_ask(self, instance: Instance, now_us: int) -> bool:
        """Whether another one than this has asked for something lately."""
        return any(now_us - i.asked_us < ACTIVE_US for i in self.values() if i is not instance)

    def forget(self, before_us: int) -> None:
        """Those that have not asked since then, and have nothing, are not listed any more."""
        for name in [name for name, i in self.items() if i.asked_us < before_us and not i.in_flight]:
            del self[name]


def states(instances: dict[str, Instance], now_us: int) -> dict[str, str]:
    """The state of each instance; `gone` for those that have asked for nothing for a minute and have nothing."""
    rates = [i.per_second for i in instances.values() if i.per_second is not None]
    fastest = max(rates, default=0.0)
    return {
        name: "gone" if not i.in_flight and now_us - i.asked_us > ACTIVE_US else i.state(fastest)
        for name, i in instances.items()
    }
