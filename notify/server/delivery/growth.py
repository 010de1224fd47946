"""Topics that grow: a key may have changed its queue by it, and its later messages wait for its earlier ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.turns import Turns
from notify.storage.queues import Store


class Growth:
    """Which growths of its topics a group is not through with yet."""

    __slots__ = ("_cursors", "_store", "_turns", "before")

    def __init__(self, store: Store, cursors: dict[tuple[str, int], Cursor], turns: Turns) -> None:
        """`cursors`: the group's, by topic and queue; `turns`: whose turn it is among them."""
        self._store = store
        self._cursors = cursors
        self._turns = turns
        self.before: dict[str, int] = {}
        """By topic that has grown: which of its growths its queues are not through with yet."""

    def follow(self, topic: str) -> None:
        """Look at all growths of a topic."""
        self.before[topic] = 0

    def forget(self, topic: str) -> None:
        """The group does not wait for this topic's growths."""
        self.before.pop(topic, None)

    def look(self) -> bool:
        """Let queues of topics that grew go on where all are through with that growth; whether any may go on.

        A key may have changed its queue by it, and its later messages wait for its earlier ones.
        """
        any_goes_on = False
        for name, before in list(self.before.items()):
            topic = self._store.topic(name)
            if topic is None:
                del self.before[name]
                continue
            cursors = [self._cursors[(name, queue)] for queue in range(topic.queues)]
            number = before
            while number < len(topic.grown) and all(
                cursor.is_through(end) for cursor, end in zip(cursors, topic.grown[number], strict=False)
            ):
                number += 1
            ends: Iterable[int | None]
            if number < len(topic.grown):
                self.before[name] = number
                ends = itertools.chain(topic.grown[number], itertools.repeat(0))  # queues since then wait wholly
            else:
                del self.before[name]
                ends = itertools.repeat(None)
            for cursor, end in zip(cursors, ends, strict=False):
                cursor.until = end
                if number != before or end is None:
                    self._turns.wake(cursor)
                    any_goes_on = True
        return any_goes_on
