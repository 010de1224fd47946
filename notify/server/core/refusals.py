"""The reports of movers (bridges and relays) about the lists of refused messages beside their sources, for people.

The lists themselves are in the sources' databases (notify/refused.py), which no server here can read. What was said is
kept in memory: a mover says it again every few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.clock import Clock
from notify.errors import Backpressure
from notify.limits import check_between, check_name
from notify.wire import RefusedReport, instant

MOST_SOURCES = 1000
MOST_SHOWN = 20
"""So many transactions of a source's list are kept here."""
TEXT_CHARACTERS = 500
FORGET_US = 3_600_000_000
"""A source that nobody has spoken of for so long is not shown any more."""


@dataclass(frozen=True, slots=True)
class _Said:
    report: RefusedReport
    at_us: int


class Refusals:
    """The last report about each source."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: dict[str, _Said] = {}

    def tell(self, source: str, report: RefusedReport) -> None:
        """Note what a mover says of its source. Raises InvalidRequest, Backpressure for one source too many."""
        check_name("source", source)
        check_between("waiting", report.waiting, 0, 1 << 53)
        check_between("the number of transactions", len(report.transactions), 0, MOST_SHOWN)
        for line in report.transactions:
            for name, text in (("id", line.id), ("topic", line.topic), ("code", line.code), ("detail", line.detail)):
                check_between(f"the length of {name}", len(text), 0, TEXT_CHARACTERS)
        self._forget()
        if source not in self._said and len(self._said) >= MOST_SOURCES:
            raise Backpressure(f"{MOST_SOURCES} sources have lists of refused messages here already")
        self._said[source] = _Said(report, self._clock())

    def _forget(self) -> None:
        before_us = self._clock() - FORGET_US
        for source in [source for source, said in self._said.items() if said.at_us < before_us]:
            del self._said[source]

    def shown(self) -> list[dict[str, Any]]:
        """By source: how many wait for a decision, the first of them with their reasons, and when that was said."""
        self._forget()
        return [shown(source, said.report, said.at_us) for source, said in sorted(self._said.items())]


def shown(source: str, report: RefusedReport, at_us: int) -> dict[str, Any]:
    """A report as the routes show it, said at `at_us` (microseconds since 1970)."""
    return {
        "source": source,
        "waiting": report.waiting,
        "said_at": instant(at_us),
        "transactions": [
            {"id": t.id, "topic": t.topic, "code": t.code, "detail": t.detail} for t in report.transactions
        ],
    }
