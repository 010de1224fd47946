"""Completeness: the share of committed messages that were delivered, and took effect, in time; against an objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DECIMALS = 4
"""A share is shown in percent with so many decimals, and cut off there: it is never shown as more than it is."""
_SCALE: int = 10**DECIMALS


@dataclass(frozen=True)
class Completeness:
    """Committed messages by what came of them within `seconds` of their place in a queue."""

    objective: float
    """The share that should be delivered and effective, in percent."""
    seconds: float
    due: int
    """Committed messages whose time is over."""
    delivered: int
    """Those of them that every subscribed group settled in time."""
    effective: int | None
    """Those of them that took effect in each of these groups that keeps an inbox; None: no inbox was read."""
    buckets: tuple[tuple[int, int, int, int], ...] = ()
    """Rows of (start in microseconds since 1970, due, delivered, effective)."""

    @property
    def is_met(self) -> bool | None:
        """Whether the objective is met; None if no message was due."""
        if not self.due:
            return None
        least = self.delivered if self.effective is None else min(self.delivered, self.effective)
        return 100 * least >= self.objective * self.due

    @property
    def sentence(self) -> str:
        """The figures in words."""
        if not self.due:
            return "completeness: no committed message was due"
        effects = "" if self.effective is None else f", {percent(self.effective, self.due)} took effect"
        delivered = f"{percent(self.delivered, self.due)} were delivered within {self.seconds:g} s"
        return (
            f"completeness: of {self.due:,} committed messages {delivered}{effects}; "
            f"the objective of {self.objective:g} % is {'met' if self.is_met else 'missed'}"
        )

    def plain(self) -> dict[str, Any]:
        """As in the JSON."""
        effective = None if self.effective is None else _share(self.effective, self.due)
        return {
            "objective_percent": self.objective,
            "seconds": self.seconds,
            "due": self.due,
            "delivered": self.delivered,
            "effective": self.effective,
            "delivered_percent": _share(self.delivered, self.due),
            "effective_percent": effective,
            "is_met": self.is_met,
            "buckets": [
                {"at_us": at_us, "due": due, "delivered": delivered}
                | ({} if self.effective is None else {"effective": effective})
                for at_us, due, delivered, effective in together(self.buckets)
            ],
        }


def completeness_of(
    buckets: Iterable[Mapping[str, Any]], seconds: float, objective: float, *, has_inbox: bool
) -> Completeness:
    """The completeness of an audit by its buckets, over all topics. `has_inbox`: whether an inbox was read."""
    sums: dict[int, list[int]] = {}
    for bucket in buckets:
        row = sums.setdefault(bucket["at_us"], [0, 0, 0])
        for place, name in enumerate(("due", "delivered", "effective")):
            row[place] += bucket[name]
    rows = tuple((at_us, *row) for at_us, row in sorted(sums.items()) if row[0])
    due, delivered, effective = (sum(row[place] for row in rows) for place in (1, 2, 3))
    return Completeness(objective, seconds, due, delivered, effective if has_inbox else None, rows)  # type: ignore[arg-type]


MOST_SHOWN = 600
"""The most buckets of the JSON and of the plot; of more, neighbours are added up."""


def together(buckets: tuple[tuple[int, int, int, int], ...]) -> list[tuple[int, int, int, int]]:
    """The buckets in at most MOST_SHOWN rows."""
    step = max(1, -(-len(buckets) // MOST_SHOWN))
    rows = []
    for first in range(0, len(buckets), step):
        part = buckets[first : first + step]
        due, delivered, effective = (sum(row[place] for row in part) for place in (1, 2, 3))
        rows.append((part[0][0], due, delivered, effective))
    return rows


def percent(part: int, whole: int) -> str:
    """A share as text for people."""
    return f"{_share(part, whole):.{DECIMALS}f}".rstrip("0").rstrip(".") + " %"


def _share(part: int, whole: int) -> float:
    if not whole:
        return 0.0
    return part * 100 * _SCALE // whole / _SCALE
