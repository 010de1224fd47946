"""Messages from a store of shipped segments, by topic, queue and offset.

A segment's messages are a Parquet table in the order of topic, queue and offset, so that a range of a queue is a few
row groups of it. The segment of an offset is found by halving the list of segments: only tables' footers are read.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from notify.errors import InvalidRequest, ObjectStoreFailed
from notify.object_store.store import ObjectMissing, Store
from notify.runtime.backoff import Backoff
from notify.spark.inputs.stored_file import opened
from notify.spark.messages.columns import BASE
from notify.spark.messages.options import Options
from notify.storage.shipped import manifest as manifests
from notify.storage.shipped.manifest import ShippedSegment

T = TypeVar("T")

PLACE = ["topic_number", "queue", "offset"]
"""The columns that say where a message is."""
_UNREADABLE = (pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError)
"""The errors of pyarrow, and of our reading, for a file that is damaged, or another tool's."""
TABLES = 64
"""Footers that are remembered; a footer of a full segment is some 100 KB."""


class ShippedMessages:
    """The messages of one store, as its manifest lists them when this is made."""

    def __init__(self, options: Options) -> None:
        """Raises ObjectStoreFailed if the store is unreachable for longer than the option timeoutSeconds."""
        self._seconds = options.timeout_seconds
        self._store = Store(options.store)
        manifest = self._patiently(lambda: manifests.load(self._store))
        if manifest is None:
            raise InvalidRequest(
                f"the store {options.store} has no manifest: name the URL that the server ships to (option store)"
            )
        self._manifest = manifest
        self._behind = list(accumulate(page.segments for page in manifest.pages))
        """For each page, how many segments it and those before it list."""
        self._page = lru_cache(4)(self._read_page)
        self._table = lru_cache(TABLES)(self._open_table)

    def close(self) -> None:
        """Close the tables."""
        self._table.cache_clear()

    # --- messages ---------------------------------------------------------------------------------------------

    def rows(self, topic: str, number: int, queue: int, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """The messages of [first, end) in the store, in order of their offsets: rows of columns.BASE."""
        at = self._first_with(number, queue, first)
        while at < self._manifest.count and first < end:
            segment = self._segment(at)
            for batch in self._kept(segment, partial(self._range_of, segment, number, queue, first, end)) or ():
                yield batch
                first = int(batch.column("offset")[-1].as_py()) + 1
            at += 1

    def offset_at(self, topic: str, number: int, queue: int, time_us: int, start: int) -> int:
        """The first offset below `start` of a message committed at an instant or later; `start` if there is none."""
        since = pa.scalar(time_us, pa.timestamp("us", tz="UTC"))
        for segment in manifests.segments_from(self._store, self._manifest, first_us=time_us):
            for batch in self._kept(segment, partial(self._range_of, segment, number, queue, 0, start)) or ():
                late = batch.filter(pc.greater_equal(batch.column("committed_at"), since))
                if late.num_rows:
                    return int(late.column("offset")[0].as_py())
            known = self._kept(segment, partial(self._offsets, segment, number, queue))
            if known is not None and known[1] >= start - 1:
                break
        return start

    def _range_of(self, segment: ShippedSegment, number: int, queue: int, first: int, end: int) -> list[pa.RecordBatch]:
        """The messages of [first, end) in one segment."""
        table = self._table(segment)
        found = []
        for group in _groups(table, number, queue):
            low, high = _span(table, group, "offset")
            if _is_of_one(table, group) and (high < first or low >= end):
                continue
            rows = table.read_row_group(group, columns=[*PLACE, *(set(BASE.names) - set(PLACE))])
            is_meant = pc.and_(
                _is_in(rows, number, queue),
                pc.and_(pc.greater_equal(rows["offset"], first), pc.less(rows["offset"], end)),
            )
            chosen = rows.filter(is_meant).select(BASE.names).cast(BASE)
            found += [batch for batch in chosen.combine_chunks().to_batches() if batch.num_rows]
        return found

    # --- which segment ----------------------------------------------------------------------------------------

    def _first_with(self, number: int, queue: int, offset: int) -> int:
        """The first segment with a message of a queue at or after an offset; the number of segments if there is
        none."""
        low, high = 0, self._manifest.count
        while low < high:
            middle = (low + high) // 2
            at, known = middle, None
            while at < high and known is None:  # skip segments without a message of this queue
                segment = self._segment(at)
                known = self._kept(segment, partial(self._offsets, segment, number, queue))
                at += 1
            if known is None or known[1] >= offset:
                high = middle
            else:
                low = at
        return low

    def _offsets(self, segment: ShippedSegment, number: int, queue: int) -> tuple[int, int] | None:
        """The first and the last offset that a segment has of a queue; None if it has none."""
        table = self._table(segment)
        first, last = -1, -1
        for group in _groups(table, number, queue):
            if _is_of_one(table, group):
                low, high = _span(table, group, "offset")
            else:
                rows = table.read_row_group(group, columns=PLACE)
                offsets = rows.filter(_is_in(rows, number, queue))["offset"]
                if not len(offsets):
                    continue
                low, high = offsets[0].as_py(), offsets[len(offsets) - 1].as_py()
            first, last = low if first < 0 else first, high
        return None if first < 0 else (first, last)

    def _segment(self, at: int) -> ShippedSegment:
        paged = self._behind[-1] if self._behind else 0
        if at >= paged:
            return self._manifest.segments[at - paged]
        page = bisect_right(self._behind, at)
        before = self._behind[page - 1] if page else 0
        return self._page(page)[at - before]

    def _read_page(self, page: int) -> tuple[ShippedSegment, ...]:
        return self._patiently(lambda: manifests.load_page(self._store, self._manifest.pages[page]))

    def _open_table(self, segment: ShippedSegment) -> pq.ParquetFile:
        file = opened(self._store, segment.parquet_name, segment.parquet.size)
        return pq.ParquetFile(file, page_checksum_verification=True)

    def _kept(self, segment: ShippedSegment, call: Callable[[], T]) -> T | None:
        """The result of a call that reads a segment; None if the server has dropped it from the store meanwhile."""
        try:
            return self._patiently(call)
        except ObjectMissing:
            now = self._patiently(lambda: manifests.load(self._store))
            if now is None or segment.base >= now.dropped_to:
                raise
            return None
        except _UNREADABLE as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            raise ObjectStoreFailed(
                f"{self._store.url}/{segment.parquet_name} is not the table that the server shipped ({why}): restore "
                "that object, or begin after it"
            ) from None

    def _patiently(self, call: Callable[[], T]) -> T:
        """The result of a call: a store that is unreachable is asked again, until the option timeoutSeconds is over."""
        deadline = time.monotonic() + self._seconds
        wait = Backoff(0.2, 5.0)
        while True:
            try:
                return call()
            except ObjectStoreFailed as error:
                pause = wait.next()
                if not error.retryable or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)


def _groups(table: pq.ParquetFile, number: int, queue: int) -> Iterator[int]:
    """The row groups that may have messages of a queue."""
    for group in range(table.metadata.num_row_groups):
        low, high = _span(table, group, "topic_number")
        if low <= number <= high:
            first, last = _span(table, group, "queue")
            if low < high or first <= queue <= last:
                yield group


def _is_of_one(table: pq.ParquetFile, group: int) -> bool:
    """Whether all rows of a group are of one queue."""
    return all(low == high for low, high in (_span(table, group, "topic_number"), _span(table, group, "queue")))


def _span(table: pq.ParquetFile, group: int, column: str) -> tuple[int, int]:
    """The lowest and the highest value of a column in a row group."""
    statistics = table.metadata.row_group(group).column(table.metadata.schema.names.index(column)).statistics
    return statistics.min, statistics.max


def _is_in(rows: pa.Table, number: int, queue: int) -> pa.ChunkedArray:
    return pc.and_(pc.equal(rows["topic_number"], number), pc.equal(rows["queue"], queue))
