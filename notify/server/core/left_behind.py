"""Reports of producers in mode `auto` about what their groups have left behind in their databases, for people.

A server cannot read those databases. The reports are kept in memory: a producer repeats its report every few seconds.
"""

from __future__ import annotations

from typing import Any

from notify.protocol.limits import check_between, check_name
from notify.protocol.wire import LeftBehindReport, instant
from notify.runtime.clock import Clock
from notify.server.core.last_reports import LastReports

MOST_REPORTS = 1000
"""The most groups with something left behind, each in one database, that are shown."""
MOST_SECONDS = 1e9


class LeftBehindReports:
    """The last report of each producer group with something left behind, by database."""

    def __init__(self, clock: Clock) -> None:
        full = f"{MOST_REPORTS} producer groups have reported what they left behind here already"
        self._reports = LastReports[tuple[str, str], LeftBehindReport](clock, MOST_REPORTS, full)

    def tell(self, report: LeftBehindReport) -> None:
        """Keep a producer's report about its group in one database. Raises InvalidRequest, and Backpressure beyond
        MOST_REPORTS."""
        check_name("producer_group", report.producer_group)
        check_name("source", report.source)
        check_between("transactions", report.transactions, 0, 1 << 53)
        check_between("seconds", report.seconds, 0, MOST_SECONDS)
        place = report.source, report.producer_group
        if report.transactions:
            self._reports.keep(place, report)
        else:
            self._reports.drop(place)

    def shown(self) -> list[dict[str, Any]]:
        """The last reports, in the order of the databases' and the groups' names."""
        now_us = self._reports.clock()
        rows = []
        for (source, group), report, at_us in self._reports.each():
            since_us = at_us - round(report.seconds * 1e6)
            rows.append(
                {
                    "source": source,
                    "producer_group": group,
                    "transactions": report.transactions,
                    "since": instant(since_us),
                    "seconds": round((now_us - since_us) / 1e6, 3),
                    "silent_seconds": round((now_us - at_us) / 1e6, 3),
                }
            )
        return rows
