"""Ranges of a table by ids or instants, so that its parts are read in parallel."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from notify import ids

ROWS_A_PART = 250_000
MOST_PARTS = 1024
"""The most parts of a table: a query or two is asked to find each edge."""

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

    def within(self, name: str) -> list[str]:
        """Conditions of SQL for the ids of the span, in a column, those in capital letters among them."""
        return conditions_of(name, [id_at(self.start_us), id_at(self.end_us)]) + self.upper_case(name)

    def upper_case(self, name: str) -> list[str]:
        """A condition of SQL for the ids of the span, in a column, whose letters are capital ones, where they may lie
        before its first id: most databases order capital letters before small ones. No id between its ends, or of no
        time, meets it, whatever the order."""
        low, high = id_at(self.start_us), id_at(self.end_us)
        letter_at = next((i for i, character in enumerate(low) if character.isalpha()), None)
        if letter_at is None:
            return []
        # G comes after each capital letter of an id; small letters follow, of ids before the span.
        end = min(high.upper(), f"{low[:letter_at]}G")
        condition = f"{name} >= '{low.upper()}' AND {name} < '{end}' AND {name} < '{low}'"
        if self.ahead_us:
            condition += f" AND {name} >= '{id_at(min(EPOCH_US, self.start_us))}'"
        return [condition]

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


def edges_by_rows(low: int, high: int, rows_between: Callable[[int, int], int], most: int = MOST_PARTS) -> list[int]:
    """Edges of parts of [low, high) with about ROWS_A_PART rows each, however unevenly the rows lie: the part with the
    most rows is halved until it has few enough, is a single number, or there are `most` parts.

    `rows_between(a, b)`: about how many rows lie in [a, b).
    """
    parts = [(-rows_between(low, high), low, high)]
    done: list[tuple[int, int]] = []
    while parts and len(parts) + len(done) < most:
        rows, start, end = heapq.heappop(parts)
        middle = (start + end) // 2
        if -rows <= ROWS_A_PART or middle == start:
            done.append((start, end))
            continue
        for a, b in ((start, middle), (middle, end)):
            heapq.heappush(parts, (-rows_between(a, b), a, b))
    starts = sorted([start for start, _ in done] + [start for _, start, _ in parts])
    return [*starts, high]


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
