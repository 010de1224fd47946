"""The parts of the log, one a segment: finds those with a queue's entries, and those that may have a transaction id."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from notify.storage.log.entry import ENTRY_SIZE, last_offset
from notify.storage.log.open_part import OpenPart
from notify.storage.log.sealed import SealedPart

Part = SealedPart | OpenPart

PLACES = 4096
"""The most readers whose next place is remembered."""


_ABOVE_ALL = b"\xff" * 8


class Parts:
    """In order of position: sealed parts, then those that are still in memory."""

    def __init__(self) -> None:
        self._all: list[Part] = []
        self._ranges: tuple[list[SealedPart], NDArray[np.uint64], NDArray[np.uint64]] | None = None
        self._numbers: dict[int, int] | None = None
        self._places: dict[tuple[int, int], Part] = {}
        """The part with a queue's next entries, by (queue's key, offset)."""
        self.being_sealed: list[OpenPart] = []
        """Full parts whose index file is being written."""
        self.sealed_id_max = 0
        """First 8 bytes of the highest id in a sealed part: no sealed part has a higher id."""

    def __iter__(self) -> Iterator[Part]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Part:
        return self._all[number]

    @property
    def live(self) -> OpenPart:
        """The part of the open segment."""
        part = self._all[-1]
        assert isinstance(part, OpenPart)
        return part

    @property
    def sealed(self) -> list[SealedPart]:
        """The parts that are index files, in order of position."""
        return [part for part in self._all if isinstance(part, SealedPart)]

    def append(self, part: Part) -> None:
        self._all.append(part)
        self._ranges = self._numbers = None

    def remove(self, part: Part) -> None:
        self._all.remove(part)
        self._changed()

    def replace(self, part: Part, by: Part) -> None:
        """Replace a part with another index of the same segment."""
        self._all[self._all.index(part)] = by
        self._changed()

    def clear(self) -> None:
        self._all.clear()
        self._changed()

    def _changed(self) -> None:
        self._ranges = self._numbers = None
        self._places.clear()

    # --- by queue and offset ----------------------------------------------------------------------------------

    def read(self, key: int, offset: int, limit: int) -> bytes:
        """Up to `limit` entries of a queue from an offset on, joined."""
        parts = self._all
        at = self.number_of(key, offset) if len(parts) > 1 else 0
        if at == len(parts) - 1:
            return parts[at].read(key, offset, limit) if limit > 0 else b""
        blobs: list[bytes] = []
        while limit > 0 and at < len(parts):
            blob = parts[at].read(key, offset, limit)
            if blob:
                blobs.append(blob)
                limit -= len(blob) // ENTRY_SIZE
                offset = last_offset(blob) + 1
                if limit <= 0:
                    if len(self._places) >= PLACES:
                        self._places.clear()
                    self._places[(key, offset)] = parts[at]
            at += 1
        return b"".join(blobs)

    def number_of(self, key: int, offset: int) -> int:
        """The number of the first part with a queue's entries from an offset on."""
        parts = self._all
        place = self._places.pop((key, offset), None)
        if place is not None:
            if self._numbers is None:
                self._numbers = {id(p): n for n, p in enumerate(parts)}
            return self._numbers[id(place)]
        at = len(parts) - 1
        while at > 0:
            first = parts[at].first_offset(key)
            if first is not None and first <= offset:
                break
            at -= 1
        return at

    def first_offsets(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The first indexed offset of each of many queues; -1: there is none.

        It looks for all queues together; one by one, an idle queue would be looked for in every part.
        """
        found = np.full(len(keys), -1, np.int64)
        missing = np.arange(len(keys))
        for part in self._all:
            if not len(missing):
                break
            wanted = keys[missing]
            if isinstance(part, SealedPart):
                keys_of_part = np.ascontiguousarray(part.runs["key"])
                at = np.minimum(np.searchsorted(keys_of_part, wanted), max(0, len(keys_of_part) - 1))
                hits = keys_of_part[at] == wanted if len(keys_of_part) else np.zeros(len(wanted), bool)
                found[missing[hits]] = part.runs["first_offset"][at[hits]]
            else:
                firsts = [part.first_offset(key) for key in wanted.tolist()]
                hits = np.array([first is not None for first in firsts], bool)
                found[missing[hits]] = [first for first in firsts if first is not None]
            missing = missing[~hits]
        return found

    # --- by transaction id ------------------------------------------------------------------------------------

    def outcome(self, transaction_id: bytes) -> bool | None:
        """True: committed; False: rolled back; None: no retained part has a decision."""
        for part in self.holding(transaction_id):
            outcome = part.outcome(transaction_id)
            if outcome is not None:
                return outcome
        return None

    def highest_decided(self) -> bytes:
        """No sealed part has the outcome of an id whose first 8 bytes are above these."""
        return _ABOVE_ALL if self.being_sealed else self.sealed_id_max.to_bytes(8)

    def has_decided(self, transaction_id: bytes) -> bool:
        """Whether a sealed part has the outcome of an id."""
        for part in self.being_sealed:
            if transaction_id in part.decided:
                return True
        if int.from_bytes(transaction_id[:8]) > self.sealed_id_max:
            return False
        return self.outcome(transaction_id) is not None

    def holding(self, transaction_id: bytes) -> Iterator[Part]:
        """The parts that may hold an id, the newest first.

        Ids rise with time, except for differences between producers' clocks. So the sealed parts that can have an id
        are adjacent: from the first one such that ids up to there reach it, to the last one such that ids from there
        on begin below it.
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
