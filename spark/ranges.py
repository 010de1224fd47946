"""Ranges of a table by ids or instants, so that its parts are read in parallel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from notify import ids

ROWS_A_PART = 250_000
MOST_PARTS = 64


EPOCH_US = 1_577_836_800_000_000
"""The beginning of 2020: an id of an earlier time was made by a clock that was not set."""


@dataclass(frozen=True)
class Span:
    """Microseconds since 1970, [start, end)."""

    start_us: int
    end_us: int
    ahead_us: int = 0
    """Ids from this instant on, and from before EPOCH_US, are of no time, and belong to each such span; 0: none is."""

    def odd(self, name: str) -> list[str]:
        """Conditions of SQL for the ids of no time, in a column; what is no id at all is mostly among them."""
        if not self.ahead_us:
            return []
        return [f"{name} < '{id_at(min(EPOCH_US, self.start_us))}'", f"{name} >= '{id_at(self.after_us)}'"]

    @property
    def after_us(self) -> int:
        """The first instant after the span whose ids are of no time."""
        return max(self.ahead_us, self.end_us)


def conditions_of(name: str, edges: Sequence[str]) -> list[str]:
    """A condition for each range between two edges; "" at an end stands for no bound."""
    conditions = []
    for low, high in itertools.pairwise(edges):
        bounds = [f"{name} >= '{low}'"] * bool(low) + [f"{name} < '{high}'"] * bool(high)
        conditions.append(" AND ".join(bounds) or "1 = 1")
    return conditions


def edges_of(low: int, high: int, rows: int) -> list[int]:
    """The edges of equal parts of [low, high), about ROWS_A_PART rows each."""
    parts = min(MOST_PARTS, max(1, rows // ROWS_A_PART))
    return [low + (high - low) * i // parts for i in range(parts)] + [high]


def id_at(us: int) -> str:
    """The lowest id that can be made at an instant."""
    return ids.to_text(max(0, us // 1000).to_bytes(6) + bytes(10))


FIRST_ID, LAST_ID = "0", "1"
"""The ids of the years up to 2527 lie between them."""


def made_us(text: str | None) -> int | None:
    """When an id was made, in microseconds since 1970; None for what is no id."""
    try:
        return int(str(text)[:13].replace("-", ""), 16) * 1000
    except ValueError:
        return None
