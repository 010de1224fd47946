"""Reports of producers in mode `auto` about what their groups have left behind in their databases, for people.

A server cannot read those databases. The reports are kept in memory: a producer repeats its report every few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.errors import Backpressure
from notify.protocol.limits import check_between, check_name
from notify.protocol.wire import LeftBehindReport, instant
from notify.runtime.clock import Clock

MOST_REPORTS = 1000
"""The most groups with something left behind, each in one database, that are shown."""
FORGET_US = 3_600_000_000
"""A group without a report for this long is no longer shown."""
MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class _Received:
    transactions: int
    since_us: int
    at_us: int


class LeftBehindReports:
    """The last report of each producer group with something left behind, by database."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._received: dict[tuple[str, str], _Received] = {}

    def tell(self, report: LeftBehindReport) -> None:
        """Keep a producer's report about its group in one database. Raises InvalidRequest, and Backpressure beyond
        MOST_REPORTS."""
        check_name("producer_group", report.producer_group)
        check_name("source", report.source)
        check_between("transactions", report.transactions, 0, 1 << 53)
        check_between("seconds", report.seconds, 0, MOST_SECONDS)
        self._forget()
        place = report.source, report.producer_group
        if not report.transactions:
            self._received.pop(place, None)
            return
        if place not in self._received and len(self._received) >= MOST_REPORTS:
            raise Backpressure(f"{MOST_REPORTS} producer groups have reported what they left behind here already")
        now_us = self._clock()
        self._received[place] = _Received(report.transactions, now_us - round(report.seconds * 1e6), now_us)

    def _forget(self) -> None:
        before_us = self._clock() - FORGET_US
        for place in [place for place, received in self._received.items() if received.at_us < before_us]:
            del self._received[place]

    def shown(self) -> list[dict[str, Any]]:
        """The last reports, in the order of the databases' and the groups' names."""
        self._forget()
        now_us = self._clock()
        return [
            {
                "source": source,
                "producer_group": group,
                "transactions": received.transactions,
                "since": instant(received.since_us),
                "seconds": round((now_us - received.since_us) / 1e6, 3),
                "silent_seconds": round((now_us - received.at_us) / 1e6, 3),
            }
            for (source, group), received in sorted(self._received.items())
        ]
