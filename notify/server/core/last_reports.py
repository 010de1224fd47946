"""Reports about places that a server cannot read, for people: the last of each, in memory."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from notify.errors import Backpressure
from notify.runtime.clock import Clock

FORGET_US = 3_600_000_000
"""A place without a report for this long is no longer shown: whoever reports repeats it every few seconds."""

Place = TypeVar("Place")
Report = TypeVar("Report")


class LastReports(Generic[Place, Report]):
    """The last report about each place, of a bounded number of places."""

    def __init__(self, clock: Clock, most: int, full: str) -> None:
        """`full`: the text of the error where `most` places have reports."""
        self.clock = clock
        self._most = most
        self._full = full
        self._received: dict[Place, tuple[Report, int]] = {}

    def keep(self, place: Place, report: Report) -> None:
        """Keep a report in place of the last one. Raises Backpressure if there is no room for another place."""
        self._forget()
        if place not in self._received and len(self._received) >= self._most:
            raise Backpressure(self._full)
        self._received[place] = report, self.clock()

    def drop(self, place: Place) -> None:
        """There is nothing to report any more."""
        self._received.pop(place, None)

    def each(self) -> list[tuple[Place, Report, int]]:
        """(place, report, when it came) in the order of the places; microseconds since 1970."""
        self._forget()
        received: list[tuple[Any, tuple[Report, int]]] = sorted(self._received.items(), key=lambda item: item[0])
        return [(place, report, at_us) for place, (report, at_us) in received]

    def _forget(self) -> None:
        before_us = self.clock() - FORGET_US
        for place in [place for place, (_, at_us) in self._received.items() if at_us < before_us]:
            del self._received[place]
