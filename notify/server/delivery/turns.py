"""Whose turn it is: the queues of a group that have something to hand out, by class and in turn.

Classes share the deliveries by weight (stride scheduling: each delivery moves its class ahead by 1 / weight, the class
that is furthest behind is next, and one that had nothing for a while does not catch up). Within a class the queues
take turns of a few messages each. A queue without messages is not visited: it is asleep until something happens to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fnmatch import fnmatchcase

from notify.server.delivery.cursor import Cursor
from notify.storage.groups import Priorities, PriorityClass

MESSAGES_A_ROUND = 4096
SHORTEST_TURN, LONGEST_TURN = 8, 256
LEAST_SHARED = 16
"""A request is shared in turns of no less: each turn is a lease and a read of its own."""

ONE_CLASS = Priorities((PriorityClass("normal", 1),))


class _Class:
    __slots__ = ("name", "patterns", "ring", "served", "weight")

    def __init__(self, name: str, weight: int, patterns: tuple[str, ...]) -> None:
        self.name = name
        self.weight = weight
        self.patterns = patterns
        self.ring: deque[Cursor] = deque()
        self.served = 0.0
        """Deliveries by weight: the class with the least is next."""


class Turns:
    """The queues of one group that are awake."""

    def __init__(self, priorities: Priorities | None) -> None:
        self._arrange(priorities or ONE_CLASS)

    def _arrange(self, priorities: Priorities) -> None:
        self.priorities = priorities
        self._classes = [_Class(c.name, c.weight, c.topics) for c in priorities.classes]
        self._of_topic: dict[str, _Class] = {}
        """The class of each topic of which a queue was awake."""
        self._now = 0.0

    def change(self, priorities: Priorities, cursors: Iterable[Cursor]) -> None:
        """Other classes or weights from now on."""
        awake = [cursor for cursor in cursors if cursor.is_awake]
        self._arrange(priorities)
        for cursor in awake:
            cursor.is_awake = False
            self.wake(cursor)

    def class_of(self, topic: str) -> str:
        """The name of a topic's class: the first with a pattern for it, else `normal`, else the last."""
        return self._class(topic).name

    def _class(self, topic: str) -> _Class:
        found = self._of_topic.get(topic)
        if found is None:
            found = next(
                (c for c in self._classes if any(fnmatchcase(topic, pattern) for pattern in c.patterns)),
                next((c for c in self._classes if c.name == "normal" and not c.patterns), self._classes[-1]),
            )
            self._of_topic[topic] = found
        return found

    def wake(self, cursor: Cursor) -> None:
        """There may be something to hand out."""
        if cursor.is_awake:
            return
        cursor.is_awake = True
        own_class = self._of_topic.get(cursor.serves) or self._class(cursor.serves)
        if not own_class.ring:
            own_class.served = max(own_class.served, self._now)
        own_class.ring.append(cursor)

    def drop(self, cursor: Cursor) -> None:
        """The queue is no longer the group's."""
        if cursor.is_awake:
            cursor.is_awake = False
            self._of_topic[cursor.serves].ring.remove(cursor)

    def forget(self, topic: str) -> None:
        self._of_topic.pop(topic, None)

    def next(self) -> Cursor | None:
        """Whose turn it is, None where all are asleep."""
        chosen: _Class | None = None
        for c in self._classes:
            if c.ring and (chosen is None or c.served < chosen.served):
                chosen = c
        return None if chosen is None else chosen.ring[0]

    def awake(self) -> int:
        """How many queues may have something to hand out."""
        return sum(len(c.ring) for c in self._classes)

    def left(self, cursor: Cursor, limit: int, asked: int) -> int:
        """How many messages its turn still has, at most `limit`. `asked`: how many the whole request is for.

        The queues that wait share a request, so that what has few messages does not wait behind what has many.
        """
        own_class = self._of_topic[cursor.serves]
        waiting = len(own_class.ring)
        if waiting == 1 and len(self._classes) == 1:
            return limit
        weights = sum([c.weight for c in self._classes if c.ring])
        if waiting == 1 and weights == own_class.weight:
            return limit
        shared = max(LEAST_SHARED, -(-asked * own_class.weight // (weights * waiting)))
        turn = max(SHORTEST_TURN, min(LONGEST_TURN, MESSAGES_A_ROUND // waiting, shared))
        if waiting == 1:  # nobody of its class waits; other classes get theirs by their weight
            return min(limit, turn)
        if cursor.turn_left <= 0:
            cursor.turn_left = self.priorities.shares.get(cursor.serves, 1) * turn
        return min(limit, cursor.turn_left)

    def served(self, cursor: Cursor, count: int, asked: int) -> None:
        """It handed out `count` messages of `asked`. One that has nothing left goes to sleep; one that got to none of
        those ahead that its group wants has its next turn after the others.
        """
        own_class = self._of_topic[cursor.serves]
        self._now = own_class.served
        own_class.served += count / own_class.weight
        cursor.turn_left -= count
        if count < asked and (cursor.may_sleep() if count else not cursor.has_more()):
            own_class.ring.popleft()
            cursor.is_awake = False
            cursor.turn_left = 0
        elif not count or cursor.turn_left <= 0:
            own_class.ring.rotate(-1)
            cursor.turn_left = 0

    def put_aside(self, cursor: Cursor) -> None:
        """Take out the one that is next: it is not for who asks now. `put_back` follows."""
        self._of_topic[cursor.serves].ring.popleft()

    def put_back(self, cursors: list[Cursor]) -> None:
        for cursor in reversed(cursors):
            self._of_topic[cursor.serves].ring.appendleft(cursor)
