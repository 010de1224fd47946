"""Ranges of a table by id or instant, so that parts of the table are read in parallel."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from notify.protocol import ids

ROWS_A_PART = 250_000
MOST_PARTS = 1024
"""The most parts of a table: each edge costs a query or two."""

EPOCH_US = 1_577_836_800_000_000
"""The beginning of 2020: an id with an earlier time was made by a clock that was not set."""


@dataclass(frozen=True)
class Span:
    """A span of time [start_us, end_us), in microseconds since 1970."""

    start_us: int
    end_us: int
    ahead_us: int = 0
    """Ids from this instant on, and from before EPOCH_US, have an impossible time. They count as ids without a time and
    belong to every span; 0: no id counts so."""

    def odd(self, name: str) -> list[str]:
        """SQL conditions for the ids without a time in a column; they also hold for most texts that are not ids."""
        if not self.ahead_us:
            return []
        return [f"{name} < '{id_at(min(EPOCH_US, self.start_us))}'", f"{name} >= '{id_at(self.after_us)}'"]

    def within(self, name: str) -> list[str]:
        """SQL conditions for the ids of the span in a column, also for ids in upper case."""
        return conditions_of(name, [id_at(self.start_us), id_at(self.end_us)]) + self.upper_case(name)

    def upper_case(self, name: str) -> list[str]:
        """An SQL condition for the ids of the span in upper case that sort before its first id; [] if there are none.

        Most databases order upper case before lower case. In any order, the condition holds for no id that sorts within
        the span and for no id without a time.
        """
        low, high = id_at(self.start_us), id_at(self.end_us)
        letter_at = next((at for at, character in enumerate(low) if character.isalpha()), None)
        if letter_at is None:
            return []
        # G follows all upper-case letters of an id. Behind it come lower-case letters, of ids before the span.
        end = min(high.upper(), f"{low[:letter_at]}G")
        condition = f"{name} >= '{low.upper()}' AND {name} < '{end}' AND {name} < '{low}'"
        if self.ahead_us:
            condition += f" AND {name} >= '{id_at(min(EPOCH_US, self.start_us))}'"
        return [condition]

    @property
    def after_us(self) -> int:
        """The first instant after the span whose ids count as ids without a time."""
        return max(self.ahead_us, self.end_us)


def conditions_of(name: str, edges: Sequence[str]) -> list[str]:
    """An SQL condition for each range between two edges; "" at an end means no bound."""
    conditions = []
    for low, high in itertools.pairwise(edges):
        bounds = [f"{name} >= '{low}'"] * bool(low) + [f"{name} < '{high}'"] * bool(high)
        conditions.append(" AND ".join(bounds) or "1 = 1")
    return conditions


def edges_by_rows(low: int, high: int, rows_between: Callable[[int, int], int], most: int = MOST_PARTS) -> list[int]:
    """The edges of parts of [low, high) with at most about ROWS_A_PART rows each, even if the rows lie unevenly.

    The part with the most rows is halved until it has few enough, is a single number, or there are `most` parts.
    `rows_between(start, end)`: about how many rows lie in [start, end).
    """
    parts = [(-rows_between(low, high), low, high)]
    done: list[tuple[int, int]] = []
    while parts and len(parts) + len(done) < most:
        rows, start, end = heapq.heappop(parts)
        middle = (start + end) // 2
        if -rows <= ROWS_A_PART or middle == start:
            done.append((start, end))
            continue
        for half_start, half_end in ((start, middle), (middle, end)):
            heapq.heappush(parts, (-rows_between(half_start, half_end), half_start, half_end))
    starts = sorted([start for start, _ in done] + [start for _, start, _ in parts])
    return [*starts, high]


def id_at(us: int) -> str:
    """The lowest id that can be made at an instant."""
    return ids.to_text(max(0, us // 1000).to_bytes(6) + bytes(10))


FIRST_ID, LAST_ID = "0", "1"
"""All ids that are made before the year 2527 lie between these two."""


def made_us(text: str | None) -> int | None:
    """When an id was made, in microseconds since 1970; None if the text is not an id."""
    try:
        return int(str(text)[:13].replace("-", ""), 16) * 1000
    except ValueError:
        return None
