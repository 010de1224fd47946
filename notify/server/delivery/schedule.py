"""When groups have to look at their leases, retries and owners again."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from notify.clock import Clock
from notify.server.delivery.group import Group


class Schedule:
    """The next time of each group at which something happens without a request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[tuple[int, int, Group]] = []
        self._numbers = itertools.count()

    def note(self, group: Group) -> None:
        """Note when the group has to be looked at next, if that is sooner than was known."""
        due_us = group.next_event_us(self._clock())
        if due_us is not None and (group.scheduled_us is None or due_us < group.scheduled_us):
            group.scheduled_us = due_us
            heapq.heappush(self._events, (due_us, next(self._numbers), group))

    def next_us(self) -> int | None:
        """When the next group has to be looked at."""
        return self._events[0][0] if self._events else None

    def take_due(self, now_us: int) -> Iterator[Group]:
        """The groups that have to be looked at by now, those included that become due meanwhile."""
        while self._events and self._events[0][0] <= now_us:
            due_us, _, group = heapq.heappop(self._events)
            if group.scheduled_us == due_us:  # else it was looked at sooner, and has another time now
                group.scheduled_us = None
                yield group
