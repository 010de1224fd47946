"""A bridge's counts since it started, and its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.binlog_bridge.log import Retained


@dataclass(slots=True)
class Totals:
    """Counts of a bridge since it started. Times are by the source's clock, in microseconds."""

    rows: int = 0
    """How many messages of the log the target has got."""
    stored: int = 0
    known: int = 0
    refused: int = 0
    left_behind_sent: int = 0
    """How many transactions that producers left behind the servers have got, which are not among the others."""
    left_behind_refused: int = 0
    batches: int = 0
    connections: int = 0
    lag_us: int = 0
    read_through_us: int = 0
    """Everything that was committed before this time has been read."""
    retained: Retained | None = None
    """The part of its log that the source keeps for this bridge; None: unknown, or it keeps none for readers."""


def describe(totals: Totals) -> dict[str, Any]:
    """The totals for the command's output."""
    return {
        "rows": totals.rows,
        "stored": totals.stored,
        "known": totals.known,
        "refused": totals.refused,
        "left_behind_sent": totals.left_behind_sent,
        "left_behind_refused": totals.left_behind_refused,
        "batches": totals.batches,
        "connections": totals.connections,
        "lag_seconds": round(totals.lag_us / 1e6, 3),
        "retained_bytes": totals.retained.kept if totals.retained else None,
    }
