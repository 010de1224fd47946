"""Reports of movers (bridges and relays) about the lists of refused messages beside their sources, for people.

The lists are in the sources' databases (notify/movers/refused.py), which a server cannot read. The reports are kept in
memory: a mover repeats its report every few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.errors import Backpressure
from notify.protocol.limits import check_between, check_name
from notify.protocol.wire import RefusedReport, instant
from notify.runtime.clock import Clock

MOST_SOURCES = 1000
MOST_SHOWN = 20
"""How many transactions of a source's list a report may have."""
TEXT_CHARACTERS = 500
FORGET_US = 3_600_000_000
"""A source without a report for this long is no longer shown."""


@dataclass(frozen=True, slots=True)
class _Received:
    report: RefusedReport
    at_us: int


class Refusals:
    """The last report about each source."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._received: dict[str, _Received] = {}

    def tell(self, source: str, report: RefusedReport) -> None:
        """Keep a mover's report about its source. Raises InvalidRequest, and Backpressure beyond MOST_SOURCES."""
        check_name("source", source)
        check_between("waiting", report.waiting, 0, 1 << 53)
        check_between("the number of transactions", len(report.transactions), 0, MOST_SHOWN)
        for line in report.transactions:
            for name, text in (("id", line.id), ("topic", line.topic), ("code", line.code), ("detail", line.detail)):
                check_between(f"the length of {name}", len(text), 0, TEXT_CHARACTERS)
        self._forget()
        if source not in self._received and len(self._received) >= MOST_SOURCES:
            raise Backpressure(f"{MOST_SOURCES} sources have lists of refused messages here already")
        self._received[source] = _Received(report, self._clock())

    def _forget(self) -> None:
        before_us = self._clock() - FORGET_US
        for source in [source for source, received in self._received.items() if received.at_us < before_us]:
            del self._received[source]

    def shown(self) -> list[dict[str, Any]]:
        """The last report about each source, in the order of their names."""
        self._forget()
        return [shown(source, received.report, received.at_us) for source, received in sorted(self._received.items())]


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
