"""One request to receive: its instance, its topics, and how many messages of each topic it may still get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import Instance


@dataclass(slots=True)
class Demand:
    """A request to receive, for the duration of one call of `Group.receive`."""

    instance: Instance
    topics: frozenset[str] | None
    """None: every topic of the group."""
    limit: int
    """The most messages of all topics together."""
    lease_us: int
    now_us: int
    may: Callable[[str], bool] | None
    """Whether the consumer has the right to receive a topic now; None: it may receive every topic."""
    is_beside_others: bool
    """Other instances of the group are active: they get what this one does not."""
    in_runs: bool = False
    """Whether it takes runs."""
    _rooms: dict[str, int] = field(default_factory=dict)
    """By topic for which the instance has a bound: how many messages the request may still get."""

    def wants(self, cursor: Cursor) -> bool:
        """Whether the request asks for the cursor's topic, and may get more messages of it."""
        topic = cursor.serves
        return (
            (self.topics is None or topic in self.topics)
            and (self.may is None or self.may(topic))
            and self.room_of(topic) > 0
        )

    def room_of(self, topic: str) -> int:
        """How many messages of a topic the request may still get."""
        if not (self.is_beside_others and topic in self.instance.bounds):
            return self.limit
        if topic not in self._rooms:
            self._rooms[topic] = self.instance.room_of(topic, self.limit)
        return self._rooms[topic]

    def handed(self, topic: str, count: int) -> None:
        """Count messages of a topic that were handed out for this request."""
        if topic in self._rooms:
            self._rooms[topic] -= count
        self.instance.handed(topic, count, self.now_us)
