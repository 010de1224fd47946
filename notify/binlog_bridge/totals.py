"""A bridge's counts since it began, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Totals:
    """Counts of a bridge since it began. Times are by the source's clock."""

    rows: int = 0
    stored: int = 0
    known: int = 0
    refused: int = 0
    batches: int = 0
    connections: int = 0
    lag_us: int = 0
    read_through_us: int = 0
    """All that was committed before this time was read."""


def describe(totals: Totals) -> dict[str, Any]:
    """For people and --json."""
    return {
        "rows": totals.rows,
        "stored": totals.stored,
        "known": totals.known,
        "refused": totals.refused,
        "batches": totals.batches,
        "connections": totals.connections,
        "lag_seconds": round(totals.lag_us / 1e6, 3),
    }
