"""Reports about databases that a server cannot read, for people: the last of each, in memory.

Bridges and relays report the lists of refused messages of their sources (notify/movers/refused.py), producers in
mode `auto` what their groups have left behind. Each repeats its report every few seconds.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from notify.errors import Backpressure
from notify.protocol.limits import check_between, check_name
from notify.protocol.wire import LeftBehindReport, RefusedReport, instant
from notify.runtime.clock import Clock

FORGET_US = 3_600_000_000
"""A place without a report for this long is no longer shown: senders repeat their reports every few seconds."""
MOST_SOURCES = 1000
"""The most sources whose lists of refused messages are shown."""
MOST_SHOWN = 20
"""How many transactions of a source's list a report may have."""
TEXT_CHARACTERS = 500
MOST_LEFT_BEHIND = 1000
"""The most groups with something left behind, each in one database, that are shown."""
MOST_SECONDS = 1e9

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


class RefusedReports:
    """The last report about the refused messages of each source."""

    def __init__(self, clock: Clock) -> None:
        full = f"{MOST_SOURCES} sources have lists of refused messages here already"
        self._reports = LastReports[str, RefusedReport](clock, MOST_SOURCES, full)

    def report(self, source: str, report: RefusedReport) -> None:
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
        return [refused_row(*each) for each in self._reports.each()]


def refused_row(source: str, report: RefusedReport, at_us: int) -> dict[str, Any]:
    """A report of refused messages as the routes show it, received at `at_us` (microseconds since 1970)."""
    return {
        "source": source,
        "waiting": report.waiting,
        "said_at": instant(at_us),
        "transactions": [
            {"id": t.id, "topic": t.topic, "code": t.code, "detail": t.detail} for t in report.transactions
        ],
    }


class LeftBehindReports:
    """The last report of each producer group with something left behind, by database."""

    def __init__(self, clock: Clock) -> None:
        full = f"{MOST_LEFT_BEHIND} producer groups have reported what they left behind here already"
        self._reports = LastReports[tuple[str, str], LeftBehindReport](clock, MOST_LEFT_BEHIND, full)

    def report(self, report: LeftBehindReport) -> None:
        """Keep a producer's report about its group in one database. Raises InvalidRequest, and Backpressure beyond
        MOST_LEFT_BEHIND."""
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
