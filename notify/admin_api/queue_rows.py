"""How many messages the rows of a topic's queues stand for, as the admin routes answer with them.

Offsets have gaps in a log that was restored from a store: no message ever has them (docs/adr/0032-restored-offsets.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def kept(rows: Iterable[Row]) -> int:
    """Messages that are retained."""
    return sum(_count(row, row["start"]) for row in rows)


def sent(rows: Iterable[Row]) -> int:
    """Messages that were ever sent."""
    return sum(_count(row, 0) for row in rows)


def _count(row: Row, first: int) -> int:
    end: int = row["end"]
    gaps: int = sum(max(0, min(end, after) - max(first, at)) for at, after in row.get("gaps", ()))
    return max(0, end - first - gaps)
