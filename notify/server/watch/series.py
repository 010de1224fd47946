"""Figures over time in a fixed amount of memory: each span has a fixed number of slots, overwritten in turn."""

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


SPANS = {"hour": Span(60, 60), "day": Span(900, 96), "week": Span(7200, 84)}
"""The spans by name. A slot of the day combines the figures of a quarter of an hour, one of the week two hours."""
LATELY = "5min"
"""The span that is the end of the hour."""
LATELY_SECONDS = 300


def step_seconds(span: str) -> int:
    """How far apart the figures of one of SPANS, or of LATELY, are."""
    return SPANS["hour" if span == LATELY else span].step_seconds


class Field(NamedTuple):
    """One figure of a series. A slot keeps the mean of its figures, or the highest one."""

    name: str
    is_highest: bool = False


class Kept(msgspec.Struct):
    """A series in a file, by span."""

    slots: dict[str, int]
    counts: dict[str, int]
    values: dict[str, list[bytes]]


class Series:
    """The figures of one topic, group or server: 4 bytes for each slot and figure."""

    __slots__ = ("_counts", "_fields", "_slots", "_values")

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._slots = dict.fromkeys(SPANS, -1)
        """The last written slot of each span, counted from 1970."""
        self._counts = dict.fromkeys(SPANS, 0)
        """How many figures the last slot of each span has."""
        self._values = {name: [array("f", [math.nan]) * span.slots for _ in fields] for name, span in SPANS.items()}

    def add(self, at: float, figures: Sequence[float | None]) -> None:
        """Add one figure for each field, None if it is unknown. `at`: seconds since 1970.

        Figures from before the newest slot are left out: the clock was set back.
        """
        for name, span in SPANS.items():
            slot = int(at // span.step_seconds)
            if slot < self._slots[name]:
                continue
            self._move(name, slot)
            index, count = slot % span.slots, self._counts[name]
            for values, field, figure in zip(self._values[name], self._fields, figures, strict=True):
                if figure is None:
                    continue
                before = values[index]
                if math.isnan(before):
                    values[index] = figure
                elif field.is_highest:
                    values[index] = max(before, figure)
                else:
                    values[index] = before + (figure - before) / (count + 1)
            self._counts[name] += 1

    def _move(self, name: str, slot: int) -> None:
        """Move to a slot, and clear it and the slots between it and the last one."""
        last, slots = self._slots[name], SPANS[name].slots
        if slot == last:
            return
        for skipped in range(max(last + 1, slot - slots + 1), slot + 1):
            for values in self._values[name]:
                values[skipped % slots] = math.nan
        self._slots[name], self._counts[name] = slot, 0

    def kept(self) -> Kept:
        """A copy for a file."""
        values = {name: [column.tobytes() for column in columns] for name, columns in self._values.items()}
        return Kept(dict(self._slots), dict(self._counts), values)

    def restore(self, stored: Kept) -> None:
        """Restore the figures of a file, by span; a span that has other fields or slots there begins empty."""
        for name, columns in self._values.items():
            values = stored.values.get(name)
            if values is None or [len(v) for v in values] != [c.itemsize * len(c) for c in columns]:
                continue
            if name in stored.slots and name in stored.counts:
                self._slots[name], self._counts[name] = stored.slots[name], stored.counts[name]
                self._values[name] = [array("f", column) for column in values]

    def columns(self, name: str) -> dict[str, Any]:
        """One of SPANS, or LATELY, in columns: `at` (seconds since 1970, the oldest first), and a list for each field,
        with None for an unknown figure.

        It begins with the first slot of the span that has a figure.
        """
        if name == LATELY:
            hour = self.columns("hour")
            first = sum(at <= hour["at"][-1] - LATELY_SECONDS for at in hour["at"])
            return {field: column[first:] for field, column in hour.items()}
        step, slots = SPANS[name]
        last = self._slots[name]
        stored_slots = range(max(0, last - slots + 1), last + 1)
        rows = [[values[slot % slots] for values in self._values[name]] for slot in stored_slots]
        first = next((n for n, row in enumerate(rows) if not all(map(math.isnan, row))), len(rows))
        columns: dict[str, Any] = {"at": [slot * step for slot in stored_slots[first:]]}
        for number, field in enumerate(self._fields):
            columns[field.name] = [_known(row[number]) for row in rows[first:]]
        return columns

    def newest(self, field: str) -> float | None:
        """The newest minute's figure of a field; None if unknown."""
        number = [f.name for f in self._fields].index(field)
        values = self._values["hour"][number]
        return _known(values[self._slots["hour"] % len(values)])

    def lately(self, field: str, minutes: int) -> list[float]:
        """The known figures of a field in the newest minutes, at most an hour."""
        number = [f.name for f in self._fields].index(field)
        values, last = self._values["hour"][number], self._slots["hour"]
        figures = [values[slot % len(values)] for slot in range(max(0, last - minutes + 1), last + 1)]
        return [figure for figure in figures if not math.isnan(figure)]


def _known(figure: float) -> float | None:
    """A figure with the seven digits that 4 bytes hold; None if it is unknown."""
    return None if math.isnan(figure) else float(f"{figure:.7g}")
