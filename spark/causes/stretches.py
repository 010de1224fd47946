"""Stretches of time: findings of one subject that follow each other without a long pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from notify.spark.result import Found

PAUSE_US = 600_000_000
"""After a pause of this length the next finding begins another stretch."""
MOST = 3
"""With more stretches than these a subject is one cause that says how many there are: single faults have no begin."""


@dataclass(frozen=True)
class Stretch:
    """Cases in order of time. `parts`: how many stretches are together in this one."""

    cases: Sequence[tuple[int, Found]]
    """Each with its instant in microseconds since 1970; 0: not known."""
    parts: int = 1

    @property
    def from_us(self) -> int:
        return next((at_us for at_us, _ in self.cases if at_us), 0)

    @property
    def to_us(self) -> int:
        return self.cases[-1][0]


def stretches_of(cases: Sequence[tuple[int, Found]]) -> list[Stretch]:
    """The stretches of cases, each with its instant, in order of time."""
    ordered = sorted(cases, key=lambda pair: (pair[0], pair[1].message_id))
    edges = [
        place for place in range(1, len(ordered)) if 0 < ordered[place - 1][0] < ordered[place][0] - PAUSE_US
    ]  # what has no time stays with the first that has one
    if len(edges) >= MOST:
        return [Stretch(ordered, len(edges) + 1)]
    starts, ends = [0, *edges], [*edges, len(ordered)]
    return [Stretch(ordered[start:end]) for start, end in zip(starts, ends, strict=True)]
