"""The work that a server reports to the others: how many transactions it has stored, and its consumers."""

from __future__ import annotations

from notify.server.core.core import Core
from notify.server.delivery.instances import states
from notify.storage.members import Member

CONSUMERS_SHOWN = 200


class CoreWork:
    """The work of one core, for its membership."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def count(self) -> int:
        """How many transactions and messages the core has stored since it started."""
        return self._core.metrics.halves + self._core.metrics.published

    def consumers(self) -> list[Member]:
        """The instances of groups that asked for messages lately, at most CONSUMERS_SHOWN."""
        core = self._core
        if not core.has_queues:
            return []
        consumers: list[Member] = []
        for group in list(core.delivery.groups.values()):
            for name, state in states(group.instances, core.clock()).items():
                if state == "gone" or len(consumers) >= CONSUMERS_SHOWN:
                    continue
                instance = group.instances[name]
                detail = {"group": group.name, "state": state, "in_flight": instance.in_flight}
                load = instance.per_second or 0.0
                consumers.append(Member(f"{group.name}/{name}"[:255], "consumer", load=load, detail=detail))
        return consumers
