"""The schedule on which groups look at their leases, retries and owners."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from notify.runtime.clock import Clock
from notify.server.delivery.group import Group


class Schedule:
    """The time of each group's next event that is not caused by a request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[tuple[int, int, Group]] = []
        self._numbers = itertools.count()

    def note(self, group: Group) -> None:
        """Schedule the group's next look, if it is sooner than the scheduled one."""
        due_us = group.next_event_us(self._clock())
        if due_us is not None and (group.scheduled_us is None or due_us < group.scheduled_us):
            group.scheduled_us = due_us
            heapq.heappush(self._events, (due_us, next(self._numbers), group))

    def next_us(self) -> int | None:
        """When the next group has to be looked at; None if none is scheduled."""
        return self._events[0][0] if self._events else None

    def take_due(self, now_us: int) -> Iterator[Group]:
        """The groups that are due now, including groups that become due during the iteration."""
        while self._events and self._events[0][0] <= now_us:
            due_us, _, group = heapq.heappop(self._events)
            if group.scheduled_us == due_us:  # otherwise it was rescheduled
                group.scheduled_us = None
                yield group
