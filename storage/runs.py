"""A set of offsets, stored as runs: memory and time grow with the number of gaps, not with the number of offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


class OffsetRuns:
    """A set of offsets, stored as ascending runs that do not touch. Iteration yields the runs as (first, count)."""

    __slots__ = ("_ends", "_starts", "offsets")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs`: (first, count), in any order."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        """The offset after the last one of each run."""
        self.offsets = 0
        """How many offsets are in the set."""
        for first, count in runs:
            self.add(first, count)

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)])

    def __contains__(self, offset: int) -> bool:
        number = bisect_right(self._starts, offset) - 1
        return number >= 0 and offset < self._ends[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetRuns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> OffsetRuns:
        copy = OffsetRuns()
        copy._starts, copy._ends, copy.offsets = self._starts.copy(), self._ends.copy(), self.offsets
        return copy

    def add(self, first: int, count: int) -> None:
        """Add `count` offsets from `first` on; some of them may be in the set already."""
        end = first + count
        low = bisect_left(self._ends, first)
        high = bisect_right(self._starts, end)
        if low < high:
            first, end = min(first, self._starts[low]), max(end, self._ends[high - 1])
            self.offsets -= sum(self._ends[low:high]) - sum(self._starts[low:high])
        self._starts[low:high] = [first]
        self._ends[low:high] = [end]
        self.offsets += end - first

    def absorb(self, floor: int) -> int:
        """Drop the offsets below `floor`, and the run that contains it.

        Returns the first offset from `floor` on that was not in the set.
        """
        dropped = 0
        for start, end in zip(self._starts, self._ends, strict=True):
            if start > floor:
                break
            floor = max(floor, end)
            self.offsets -= end - start
            dropped += 1
        del self._starts[:dropped], self._ends[:dropped]
        return floor

    def first_missing(self, offset: int) -> int:
        """The first offset from `offset` on that is not in the set."""
        number = bisect_right(self._starts, offset) - 1
        return max(offset, self._ends[number]) if number >= 0 else offset

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """The runs (first, count) of [first, end) that are not in the set."""
        runs: list[tuple[int, int]] = []
        number = bisect_right(self._ends, first)
        while first < end:
            start, behind = (end, end) if number >= len(self._starts) else (self._starts[number], self._ends[number])
            if start > first:
                runs.append((first, min(start, end) - first))
            first, number = max(first, behind), number + 1
        return runs

    def between(self, first: int, end: int) -> int:
        """How many offsets of [first, end) are in the set."""
        low, high = bisect_right(self._ends, first), bisect_left(self._starts, end)
        runs = zip(self._starts[low:high], self._ends[low:high], strict=True)
        return sum(min(run_end, end) - max(run_start, first) for run_start, run_end in runs)

    def mask(self, offsets: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these offsets are in the set."""
        if not self._starts:
            return np.zeros(len(offsets), bool)
        numbers = np.searchsorted(np.array(self._starts, np.uint64), offsets, side="right").astype(np.int64) - 1
        ends = np.array(self._ends, np.uint64)
        return (numbers >= 0) & (offsets < ends[np.maximum(numbers, 0)])
