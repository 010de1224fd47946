"""The turns of a group's queues that have messages to hand out, by priority class.

Classes share the deliveries by weight (stride scheduling: each delivery moves its class ahead by 1 / weight, the class
that is furthest behind is next, and a class that had no messages for a while does not catch up). Within a class the
queues take turns of a few messages each. A queue without messages sleeps, and is not visited until it is woken.
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
"""The least messages of a turn when queues share a request: each turn costs a lease and a read."""

ONE_CLASS = Priorities((PriorityClass("normal", 1),))


class _Class:
    __slots__ = ("name", "patterns", "ring", "served", "weight")

    def __init__(self, name: str, weight: int, patterns: tuple[str, ...]) -> None:
        self.name = name
        self.weight = weight
        self.patterns = patterns
        self.ring: deque[Cursor] = deque()
        self.served = 0.0
        """Deliveries divided by the weight: the class with the least is next."""


class Turns:
    """The queues of one group that are awake."""

    def __init__(self, priorities: Priorities | None) -> None:
        self._arrange(priorities or ONE_CLASS)

    def _arrange(self, priorities: Priorities) -> None:
        self.priorities = priorities
        self._classes = [_Class(c.name, c.weight, c.topics) for c in priorities.classes]
        self._of_topic: dict[str, _Class] = {}
        """The class of each topic that had an awake queue."""
        self._now = 0.0

    def change(self, priorities: Priorities, cursors: Iterable[Cursor]) -> None:
        """Apply other classes or weights from now on."""
        awake = [cursor for cursor in cursors if cursor.is_awake]
        self._arrange(priorities)
        for cursor in awake:
            cursor.is_awake = False
            self.wake(cursor)

    def class_of(self, topic: str) -> str:
        """The name of a topic's class: the first with a pattern for it, else `normal`, else the last."""
        return self._class(topic).name

    def _class(self, topic: str) -> _Class:
        topic_class = self._of_topic.get(topic)
        if topic_class is None:
            topic_class = next(
                (c for c in self._classes if any(fnmatchcase(topic, pattern) for pattern in c.patterns)),
                next((c for c in self._classes if c.name == "normal" and not c.patterns), self._classes[-1]),
            )
            self._of_topic[topic] = topic_class
        return topic_class

    def wake(self, cursor: Cursor) -> None:
        """Have a queue take turns: it may have messages to hand out."""
        if cursor.is_awake:
            return
        cursor.is_awake = True
        topic_class = self._of_topic.get(cursor.serves) or self._class(cursor.serves)
        if not topic_class.ring:
            topic_class.served = max(topic_class.served, self._now)
        topic_class.ring.append(cursor)

    def drop(self, cursor: Cursor) -> None:
        """Remove a queue that the group no longer follows."""
        if cursor.is_awake:
            cursor.is_awake = False
            self._of_topic[cursor.serves].ring.remove(cursor)

    def forget(self, topic: str) -> None:
        self._of_topic.pop(topic, None)

    def next(self) -> Cursor | None:
        """The queue whose turn it is; None if all are asleep."""
        chosen: _Class | None = None
        for c in self._classes:
            if c.ring and (chosen is None or c.served < chosen.served):
                chosen = c
        return None if chosen is None else chosen.ring[0]

    def awake(self) -> int:
        """How many queues are awake."""
        return sum(len(c.ring) for c in self._classes)

    def left(self, cursor: Cursor, limit: int, asked: int) -> int:
        """How many messages are left of a queue's turn, at most `limit`. `asked`: how many the whole request asks for.

        The waiting queues share a request, so that a queue with few messages does not wait behind one with many.
        """
        topic_class = self._of_topic[cursor.serves]
        waiting = len(topic_class.ring)
        if waiting == 1 and len(self._classes) == 1:
            return limit
        weights = sum([c.weight for c in self._classes if c.ring])
        if waiting == 1 and weights == topic_class.weight:
            return limit
        shared = max(LEAST_SHARED, -(-asked * topic_class.weight // (weights * waiting)))
        turn = max(SHORTEST_TURN, min(LONGEST_TURN, MESSAGES_A_ROUND // waiting, shared))
        if waiting == 1:  # no other queue of the class waits; other classes get their turns by weight
            return min(limit, turn)
        if cursor.turn_left <= 0:
            cursor.turn_left = self.priorities.shares.get(cursor.serves, 1) * turn
        return min(limit, cursor.turn_left)

    def served(self, cursor: Cursor, count: int, asked: int) -> None:
        """Count messages that a queue handed out, of `asked`. A queue without further messages falls asleep; a queue
        whose turn is used up, or that found no message its group wants, has its next turn after the others.
        """
        topic_class = self._of_topic[cursor.serves]
        self._now = topic_class.served
        topic_class.served += count / topic_class.weight
        cursor.turn_left -= count
        if count < asked and (cursor.may_sleep() if count else not cursor.has_more()):
            topic_class.ring.popleft()
            cursor.is_awake = False
            cursor.turn_left = 0
        elif not count or cursor.turn_left <= 0:
            topic_class.ring.rotate(-1)
            cursor.turn_left = 0

    def put_aside(self, cursor: Cursor) -> None:
        """Take out the next queue, which the present request does not want. Call `put_back` afterwards."""
        self._of_topic[cursor.serves].ring.popleft()

    def put_back(self, cursors: list[Cursor]) -> None:
        for cursor in reversed(cursors):
            self._of_topic[cursor.serves].ring.appendleft(cursor)
