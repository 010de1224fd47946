"""How many messages the rows of a topic's queues stand for, and how rows of groups are sorted, as the admin routes
answer with them.

Offsets have gaps in a log that was restored from a store: no message ever has them (docs/adr/0032-restored-offsets.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def kept(rows: Iterable[Row]) -> int:
    """Messages that are retained."""
    return sum(_count(row, row["start"]) for row in rows)


def sent(rows: Iterable[Row]) -> int:
    """Messages that were ever sent."""
    return sum(_count(row, 0) for row in rows)


BEHIND_SECONDS = 5.0
BEHIND_MESSAGES = 100
"""A group is behind if its oldest message is this old, or, where that is unknown, if this many messages wait."""


def state(row: Row) -> str:
    """A group's state in words: the one that needs an operator most."""
    if row["paused"]:
        return "paused"
    if row["lag"] and not row["consumers"]:
        return "no consumer"
    if row.get("is_failing"):
        return "failing"
    if row.get("dead_letters"):
        return "dead letters"
    oldest = row.get("oldest_seconds")
    is_behind = row["lag"] >= BEHIND_MESSAGES if oldest is None else row["lag"] and oldest >= BEHIND_SECONDS
    return "behind" if is_behind else "up to date"


def pain(row: Row) -> tuple[Any, ...]:
    """Greater for a group that needs an operator more: stuck work first, then messages that are given up
    now, then by the age of the oldest message, lag, dead letters and latency."""
    urgency = {"no consumer": 2, "failing": 1}.get(state(row), 0)
    return urgency, _figure(row, "oldest_seconds"), row["lag"], _figure(row, "dead_letters"), p99(row)


def p99(row: Row) -> float:
    """The 99th percentile of a group's time from commit to acknowledgement, in seconds; 0 if unknown."""
    acked = row["latency"]["commit_to_ack"] or {}
    seconds: float = acked.get("p99") or 0.0
    return seconds


def _figure(row: Row, name: str) -> float:
    figure: float = row.get(name) or 0.0
    return figure


GROUP_SORTS: dict[str, Callable[[Row], Any]] = {
    "pain": pain,
    "lag": lambda row: row["lag"],
    "oldest": lambda row: _figure(row, "oldest_seconds"),
    "in": lambda row: _figure(row, "arrived_per_second"),
    "out": lambda row: _figure(row, "settled_per_second"),
    "p99": p99,
    "dead_letters": lambda row: _figure(row, "dead_letters"),
    "consumers": lambda row: _figure(row, "consumers"),
}
"""How a list of groups is sorted other than by name: the largest first, and then by name."""


def sorted_groups(rows: Iterable[Row], sort: str, most: int) -> list[Row]:
    """The first rows of groups in an order of GROUP_SORTS, or by name."""
    by_name = sorted(rows, key=lambda row: row["name"])
    return (sorted(by_name, key=GROUP_SORTS[sort], reverse=True) if sort in GROUP_SORTS else by_name)[:most]


def _count(row: Row, first: int) -> int:
    end: int = row["end"]
    gaps: int = sum(max(0, min(end, after) - max(first, at)) for at, after in row.get("gaps", ()))
    return max(0, end - first - gaps)
