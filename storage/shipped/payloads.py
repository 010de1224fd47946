"""Finds the payloads that a segment's entries point at: in this segment, in an earlier one, moved
when an earlier one was dropped, or in the store."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from notify.object_store.store import Store
from notify.storage.log.entry import EntryKind
from notify.storage.log.segments import segment_name
from notify.storage.shipped.local import LocalLog
from notify.storage.shipped.manifest import Manifest, ShippedSegment, segments_from

MOST_MAPPED = 4


class Payloads:
    """Reads the payloads that one segment's index refers to. A context manager, which closes its files on exit."""

    def __init__(self, log: LocalLog, store: Store, manifest: Manifest, entries: NDArray[np.void]) -> None:
        self._log = log
        self._store = store
        self._bases = log.bases()
        self._mapped: dict[int, mmap.mmap] = {}
        queued = entries["position"][entries["kind"] == EntryKind.QUEUE]
        gone = np.unique(queued[queued < np.uint64(self._bases[0])]) if self._bases else queued
        self._moved = self._carried(gone) if len(gone) else {}
        left = [position for position in gone.tolist() if position not in self._moved]
        self._shipped: Sequence[ShippedSegment] = tuple(segments_from(store, manifest, min(left))) if left else ()

    def __enter__(self) -> Payloads:
        return self

    def __exit__(self, *raised: object) -> None:
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()

    def read(self, position: int, size: int) -> bytes:
        """The bytes at a position; fewer, or none, if they cannot be found."""
        here = self._read_here(self._moved.get(position, position), size)
        return here if here is not None else self._read_shipped(position, size)

    def _read_here(self, position: int, size: int) -> bytes | None:
        at = bisect_right(self._bases, position) - 1
        if at < 0:
            return None
        base = self._bases[at]
        mapped = self._mapped.get(base)
        if mapped is None:
            if len(self._mapped) >= MOST_MAPPED:
                self._mapped.pop(next(iter(self._mapped))).close()
            try:
                with (self._log.directory / segment_name(base)).open("rb") as file:
                    mapped = self._mapped[base] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                return None  # retention has just dropped it: the store has it
        return mapped[position - base : position - base + size]

    def _read_shipped(self, position: int, size: int) -> bytes:
        at = bisect_right(self._shipped, position, key=lambda segment: segment.base) - 1
        if at < 0 or position >= self._shipped[at].end:
            return b""
        segment = self._shipped[at]
        return self._store.read_range(segment.log_name, position - segment.base, size)

    def _carried(self, positions: NDArray[np.uint64]) -> dict[int, int]:
        """The positions of payloads that were moved when their segments were dropped; the latest copy counts."""
        moved: dict[int, int] = {}
        for base in self._bases:
            try:
                with self._log.index(base) as part:
                    carried = part.entries[part.entries["kind"] == EntryKind.CARRY]
            except FileNotFoundError:
                continue  # not sealed yet
            carried = carried[np.isin(carried["offset"], positions)]
            moved.update(zip(carried["offset"].tolist(), carried["position"].tolist(), strict=True))
        return moved
