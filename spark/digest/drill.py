"""The part of its inputs that an audit reads row by row: ranges of slots, and invalid ids."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from notify.spark.digest.slots import SLOT_BYTES, SLOT_CHARACTERS, SlotRange, ranges_of
from notify.spark.inputs.ranges import ROWS_A_PART, conditions_of, id_at

MOST_RANGES = 64


def _any(conditions: Sequence[str]) -> str:
    return "(" + " OR ".join(f"({condition})" for condition in conditions) + ")"


@dataclass(frozen=True)
class Drill:
    """Ranges in order; `beginnings`: the first characters of rows that no slot has."""

    ranges: Sequence[SlotRange]
    beginnings: Sequence[str] = ()
    messages: int = 0
    """About how many there are."""

    @staticmethod
    def into(slots: Collection[int], beginnings: Collection[str] = ()) -> Drill:
        """The least that holds these slots and has no more than MOST_RANGES ranges."""
        return Drill(ranges_of(slots, MOST_RANGES), sorted(beginnings))

    def __contains__(self, slot: int) -> bool:
        return any(r.first <= slot < r.end for r in self.ranges)

    def conditions(self, column: str) -> list[str]:
        """A condition of SQL for each part, by a column of ids. A part has several ranges: a query for each of them
        would take longer than to read it."""
        ranges = [conditions_of(column, [id_at(r.start_us), id_at(r.end_us)])[0] for r in self.ranges]
        number = min(len(ranges), 1 + self.messages // ROWS_A_PART)
        edges = [len(ranges) * i // max(1, number) for i in range(number + 1)]
        parts = [_any(ranges[a:b]) for a, b in itertools.pairwise(edges)]
        if self.beginnings:
            listed = ", ".join(f"'{text}'" for text in self.beginnings)
            others = f" AND NOT {_any(ranges)}" if ranges else ""
            parts.append(f"substr({column}, 1, {SLOT_CHARACTERS}) IN ({listed}){others}")
        return parts

    def where(self, column: str) -> str:
        """The condition for all parts."""
        return _any(self.conditions(column))

    def within(self, rows: DataFrame) -> DataFrame:
        """The rows with ids of the slots. Invalid ids do not have 16 bytes, or belong to a slot."""
        bounds = [
            (F.col("id") >= F.lit(r.first.to_bytes(SLOT_BYTES))) & (F.col("id") < F.lit(r.end.to_bytes(SLOT_BYTES)))
            for r in self.ranges
        ]
        return rows.where(reduce(Column.__or__, bounds, F.lit(False)))
