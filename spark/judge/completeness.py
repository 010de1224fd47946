"""Completeness: the share of committed messages that were delivered and took effect in time, against an objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DECIMALS = 4
"""The number of decimals of a share in percent. It is rounded down, so that it never appears larger than it is."""
_SCALE: int = 10**DECIMALS


@dataclass(frozen=True)
class Completeness:
    """Counts of committed messages that were delivered and took effect within `seconds` after they were queued."""

    objective: float
    """The share of messages, in percent, that should be delivered and take effect in time."""
    seconds: float
    due: int
    """The committed messages whose time is over."""
    delivered: int
    """The due messages that every subscribed group settled in time."""
    effective: int | None
    """The due messages that took effect in each subscribed group with an inbox; None: no inbox was read."""
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
        """The form for JSON."""
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
    """The completeness over all buckets and topics of an audit. `has_inbox`: whether an inbox was read."""
    sums: dict[int, list[int]] = {}
    for bucket in buckets:
        row = sums.setdefault(bucket["at_us"], [0, 0, 0])
        for place, name in enumerate(("due", "delivered", "effective")):
            row[place] += bucket[name]
    rows = tuple((at_us, *row) for at_us, row in sorted(sums.items()) if row[0])
    due, delivered, effective = (sum(row[place] for row in rows) for place in (1, 2, 3))
    return Completeness(objective, seconds, due, delivered, effective if has_inbox else None, rows)  # type: ignore[arg-type]


MOST_SHOWN = 600
"""The most buckets in the JSON and in the plot. If there are more, neighbouring buckets are added up."""


def together(buckets: tuple[tuple[int, int, int, int], ...]) -> list[tuple[int, int, int, int]]:
    """The buckets, added up to at most MOST_SHOWN rows."""
    step = max(1, -(-len(buckets) // MOST_SHOWN))
    rows = []
    for first in range(0, len(buckets), step):
        part = buckets[first : first + step]
        due, delivered, effective = (sum(row[place] for row in part) for place in (1, 2, 3))
        rows.append((part[0][0], due, delivered, effective))
    return rows


def percent(part: int, whole: int) -> str:
    """The share of `part` in `whole`, as a text such as `99.5 %`."""
    return f"{_share(part, whole):.{DECIMALS}f}".rstrip("0").rstrip(".") + " %"


def _share(part: int, whole: int) -> float:
    if not whole:
        return 0.0
    return part * 100 * _SCALE // whole / _SCALE
