"""The parts of the log, one a segment, and which of them may hold a transaction id."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from notify.storage.log.live import LivePart
from notify.storage.log.sealed import SealedPart

Part = SealedPart | LivePart


class Parts:
    """In order of position: sealed parts, then those that are still in memory."""

    def __init__(self) -> None:
        self._all: list[Part] = []
        self._ranges: tuple[list[SealedPart], NDArray[np.uint64], NDArray[np.uint64]] | None = None
        self._numbers: dict[int, int] | None = None

    def __iter__(self) -> Iterator[Part]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Part:
        return self._all[number]

    def number_of(self, part: Part) -> int | None:
        """Where a part stands, None if it is not here any more."""
        if self._numbers is None:
            self._numbers = {id(p): n for n, p in enumerate(self._all)}
        number = self._numbers.get(id(part))
        return number if number is not None and self._all[number] is part else None

    def append(self, part: Part) -> None:
        self._all.append(part)
        self._ranges = self._numbers = None

    def remove(self, part: Part) -> None:
        self._all.remove(part)
        self._ranges = self._numbers = None

    def replace(self, part: Part, by: Part) -> None:
        self._all[self._all.index(part)] = by
        self._ranges = self._numbers = None

    def clear(self) -> None:
        self._all.clear()
        self._ranges = self._numbers = None

    def first_offsets(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The first offset that is still indexed of each of many queues, -1 where there is none.

        All at once: one by one, an idle queue would be looked for in every part.
        """
        found = np.full(len(keys), -1, np.int64)
        missing = np.arange(len(keys))
        for part in self._all:
            if not len(missing):
                break
            wanted = keys[missing]
            if isinstance(part, SealedPart):
                here = np.ascontiguousarray(part.runs["key"])
                at = np.minimum(np.searchsorted(here, wanted), max(0, len(here) - 1))
                hits = here[at] == wanted if len(here) else np.zeros(len(wanted), bool)
                found[missing[hits]] = part.runs["first_offset"][at[hits]]
            else:
                firsts = [part.first_offset(key) for key in wanted.tolist()]
                hits = np.array([first is not None for first in firsts], bool)
                found[missing[hits]] = [first for first in firsts if first is not None]
            missing = missing[~hits]
        return found

    def holding(self, transaction_id: bytes) -> Iterator[Part]:
        """The parts that may hold an id, the newest first.

        Ids rise with time but for their producers' clocks. So the sealed parts that can hold one lie together: from
        the first that anything up to there reaches it, to the last that anything from there on begins below it.
        """
        for part in reversed(self._all):
            if isinstance(part, SealedPart):
                break
            yield part
        if self._ranges is None:
            self._ranges = self._make_ranges()
        sealed, highest_so_far, lowest_from_here = self._ranges
        high = int.from_bytes(transaction_id[:8])
        first = int(np.searchsorted(highest_so_far, np.uint64(high)))
        end = int(np.searchsorted(lowest_from_here, np.uint64(high), side="right"))
        for part in reversed(sealed[first:end]):
            if part.id_min <= high <= part.id_max:
                yield part

    def _make_ranges(self) -> tuple[list[SealedPart], NDArray[np.uint64], NDArray[np.uint64]]:
        sealed = [part for part in self._all if isinstance(part, SealedPart) and part.count]
        lows = np.array([part.id_min for part in sealed], np.uint64)
        highs = np.array([part.id_max for part in sealed], np.uint64)
        return sealed, np.maximum.accumulate(highs), np.minimum.accumulate(lows[::-1])[::-1]
