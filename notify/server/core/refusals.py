"""Reports of movers (bridges and relays) about the lists of refused messages beside their sources, for people.

The lists are in the sources' databases (notify/movers/refused.py), which a server cannot read. The reports are kept in
memory: a mover repeats its report every few seconds.
"""

from __future__ import annotations

from typing import Any

from notify.protocol.limits import check_between, check_name
from notify.protocol.wire import RefusedReport, instant
from notify.runtime.clock import Clock
from notify.server.core.last_reports import LastReports

MOST_SOURCES = 1000
MOST_SHOWN = 20
"""How many transactions of a source's list a report may have."""
TEXT_CHARACTERS = 500


class Refusals:
    """The last report about each source."""

    def __init__(self, clock: Clock) -> None:
        full = f"{MOST_SOURCES} sources have lists of refused messages here already"
        self._reports = LastReports[str, RefusedReport](clock, MOST_SOURCES, full)

    def tell(self, source: str, report: RefusedReport) -> None:
        """Keep a mover's report about its source. Raises InvalidRequest, and Backpressure beyond MOST_SOURCES."""
        check_name("source", source)
        check_between("waiting", report.waiting, 0, 1 << 53)
        check_between("the number of transactions", len(report.transactions), 0, MOST_SHOWN)
        for line in report.transactions:
            for name, text in (("id", line.id), ("topic", line.topic), ("code", line.code), ("detail", line.detail)):
                check_between(f"the length of {name}", len(text), 0, TEXT_CHARACTERS)
        self._reports.keep(source, report)

    def shown(self) -> list[dict[str, Any]]:
        """The last report about each source, in the order of their names."""
        return [shown(*each) for each in self._reports.each()]


def shown(source: str, report: RefusedReport, at_us: int) -> dict[str, Any]:
    """A report as the routes show it, received at `at_us` (microseconds since 1970)."""
    return {
        "source": source,
        "waiting": report.waiting,
        "said_at": instant(at_us),
        "transactions": [
            {"id": t.id, "topic": t.topic, "code": t.code, "detail": t.detail} for t in report.transactions
        ],
    }
