"""One request to receive: who asks, for what, and how much of each topic it may still be handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import Instance


@dataclass(slots=True)
class Asked:
    """Belongs to one call of `Group.receive`."""

    instance: Instance
    topics: frozenset[str] | None
    """None: every topic of the group."""
    limit: int
    """The most messages that it is handed, of all topics together."""
    lease_us: int
    now_us: int
    may: Callable[[str], bool] | None
    """Whether who asks may receive a topic, asked now; None: every one."""
    is_beside_others: bool
    """Other instances of the group ask, too: what is kept from this one they can have."""
    _rooms: dict[str, int] = field(default_factory=dict)
    """Messages that it may still be handed, by topic, where the instance has a bound."""

    def wants(self, cursor: Cursor) -> bool:
        """Whether it asks for this topic, and may be handed more of it."""
        topic = cursor.serves
        return (
            (self.topics is None or topic in self.topics)
            and (self.may is None or self.may(topic))
            and self.room_of(topic) > 0
        )

    def room_of(self, topic: str) -> int:
        """How many messages of a topic it may still be handed."""
        if not (self.is_beside_others and topic in self.instance.bounds):
            return self.limit
        if topic not in self._rooms:
            self._rooms[topic] = self.instance.room_of(topic, self.limit)
        return self._rooms[topic]

    def handed(self, topic: str, count: int) -> None:
        """So many messages of a topic were handed out for this request."""
        if topic in self._rooms:
            self._rooms[topic] -= count
        self.instance.handed(topic, count, self.now_us)
