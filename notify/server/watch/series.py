"""Figures over time in a fixed amount of memory: of each span so many slots, which the newest figures overwrite."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec


class Span(NamedTuple):
    """How far back figures go, and how far apart they are."""

    step_seconds: int
    slots: int


SPANS = {"hour": Span(60, 60), "day": Span(900, 96)}
"""By name. A slot of a day holds what the minutes of a quarter of an hour were."""


class Field(NamedTuple):
    """One figure of a series: of several in a slot the mean is kept, or the highest."""

    name: str
    is_highest: bool = False


class Kept(msgspec.Struct):
    """A series as a file keeps it, by span."""

    slots: dict[str, int]
    counts: dict[str, int]
    values: dict[str, list[bytes]]


class Series:
    """Some figures of one thing, such as a topic: 4 bytes for each slot and figure."""

    __slots__ = ("_counts", "_fields", "_slots", "_values")

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._slots = dict.fromkeys(SPANS, -1)
        """The slot of each span that was written last, counted from 1970."""
        self._counts = dict.fromkeys(SPANS, 0)
        """How many figures are in that slot."""
        self._values = {name: [array("f", [math.nan]) * span.slots for _ in fields] for name, span in SPANS.items()}

    def add(self, at: float, figures: Sequence[float | None]) -> None:
        """Add one figure for each field, None where it is not known. `at`: seconds since 1970.

        A time before that of the newest slot is left out: the clock was set back.
        """
        for name, span in SPANS.items():
            slot = int(at // span.step_seconds)
            if slot < self._slots[name]:
                continue
            self._move(name, slot)
            place, count = slot % span.slots, self._counts[name]
            for values, field, figure in zip(self._values[name], self._fields, figures, strict=True):
                if figure is None:
                    continue
                before = values[place]
                if math.isnan(before):
                    values[place] = figure
                elif field.is_highest:
                    values[place] = max(before, figure)
                else:
                    values[place] = before + (figure - before) / (count + 1)
            self._counts[name] += 1

    def _move(self, name: str, slot: int) -> None:
        """Go on to a slot; those between it and the last one have no figures."""
        last, slots = self._slots[name], SPANS[name].slots
        if slot == last:
            return
        for passed in range(max(last + 1, slot - slots + 1), slot + 1):
            for values in self._values[name]:
                values[passed % slots] = math.nan
        self._slots[name], self._counts[name] = slot, 0

    def kept(self) -> Kept:
        """A copy for a file."""
        values = {name: [column.tobytes() for column in columns] for name, columns in self._values.items()}
        return Kept(dict(self._slots), dict(self._counts), values)

    def restore(self, kept: Kept) -> None:
        """Take the figures that a file had, unless they are of other fields or spans."""
        sizes = {name: [column.itemsize * len(column) for column in columns] for name, columns in self._values.items()}
        if sizes != {name: [len(column) for column in columns] for name, columns in kept.values.items()}:
            return
        if not kept.slots.keys() == kept.counts.keys() == self._slots.keys():
            return
        self._slots, self._counts = dict(kept.slots), dict(kept.counts)
        self._values = {name: [array("f", column) for column in columns] for name, columns in kept.values.items()}

    def columns(self, name: str) -> dict[str, Any]:
        """`at` (seconds since 1970, the oldest first) and a list for each field, None where nothing is known.

        It begins with the first slot of the span that has a figure.
        """
        step, slots = SPANS[name]
        last = self._slots[name]
        held = range(max(0, last - slots + 1), last + 1)
        rows = [[values[slot % slots] for values in self._values[name]] for slot in held]
        first = next((n for n, row in enumerate(rows) if not all(map(math.isnan, row))), len(rows))
        columns: dict[str, Any] = {"at": [slot * step for slot in held[first:]]}
        for number, field in enumerate(self._fields):
            columns[field.name] = [None if math.isnan(row[number]) else round(row[number], 3) for row in rows[first:]]
        return columns

    def newest(self, field: str) -> float | None:
        """The newest minute's figure."""
        number = [f.name for f in self._fields].index(field)
        values = self._values["hour"][number]
        figure = values[self._slots["hour"] % len(values)]
        return None if math.isnan(figure) else round(figure, 3)
