"""Topics that grow: a key may move to another queue, and its later messages wait for its earlier ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.turns import Turns
from notify.storage.queues import Store


class Growth:
    """The growths of topics that a group has not passed yet."""

    __slots__ = ("_cursors", "_store", "_turns", "before")

    def __init__(self, store: Store, cursors: dict[tuple[str, int], Cursor], turns: Turns) -> None:
        """`cursors`: the group's cursors by (topic, queue); `turns`: their turns."""
        self._store = store
        self._cursors = cursors
        self._turns = turns
        self.before: dict[str, int] = {}
        """By topic that has grown: the number of the first growth that its queues have not passed yet."""

    def follow(self, topic: str) -> None:
        """Check all growths of a topic from the next `look` on."""
        self.before[topic] = 0

    def forget(self, topic: str) -> None:
        """Stop waiting for a topic's growths."""
        self.before.pop(topic, None)

    def look(self) -> bool:
        """Let the queues of a topic that grew continue when all have passed that growth; whether any continues."""
        any_continues = False
        for name, first_number in list(self.before.items()):
            topic = self._store.topic(name)
            if topic is None:
                del self.before[name]
                continue
            cursors = [self._cursors[(name, queue)] for queue in range(topic.queues)]
            number = first_number
            while number < len(topic.grown) and all(
                cursor.is_through(end) for cursor, end in zip(cursors, topic.grown[number], strict=False)
            ):
                number += 1
            untils: Iterable[int | None]
            if number < len(topic.grown):
                self.before[name] = number
                untils = itertools.chain(topic.grown[number], itertools.repeat(0))  # newer queues wait from offset 0
            else:
                del self.before[name]
                untils = itertools.repeat(None)
            for cursor, end in zip(cursors, untils, strict=False):
                cursor.until = end
                if number != first_number or end is None:
                    self._turns.wake(cursor)
                    any_continues = True
        return any_continues
