"""Reads a whole segment of the log into columns: its messages, what groups did with them, and its damage.

Python verifies the frames, one for each group commit; numpy gathers their entries. A half and its outcome in one
segment become one row, and settled offsets get the ids of their messages. So only rows of different segments are left
to join.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from notify.spark.columns import (
    ACKS,
    ATTEMPTED,
    CHECKS,
    MASK_GROUPS,
    MESSAGES,
    ROLLED_BACK,
    ids_of,
    message_rows,
    places,
)
from notify.spark.damage import examine
from notify.storage.log import meta
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_SIZE, ENTRY_TYPE, EntryKind
from notify.storage.log.format import FRAME_HEADER_SIZE, read_segment_header
from notify.storage.log.records import (
    RECORD_HEADER,
    RECORD_HEADER_SIZE,
    Progressed,
    RecordType,
    check_answered,
    progressed,
    sender_bytes,
    sender_of,
)
from notify.storage.log.recovery import Damage, SegmentReader, walk
from notify.storage.log.segments import Segment


@dataclass
class Facts:
    """Facts about a segment besides its rows, as plain values for JSON."""

    base: int
    end: int
    first_us: int = 0
    last_us: int = 0
    messages: int = 0
    acks: int = 0
    consumer_groups: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    meta: list[list[Any]] = field(default_factory=list)
    """[position, time, record] of META records."""
    strays: int = 0
    """Number of rollbacks whose halves are in other segments."""
    loose: int = 0
    """Number of acks of messages in other segments."""
    broken: list[dict[str, Any]] = field(default_factory=list)
    """Damage, as spark.damage describes it."""
    is_sealed: bool = False


class ReadOnlyDisk(Disk):
    """A log that a server may be writing."""

    def open(self, name: str, create: bool = False) -> int:
        return os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)


class SegmentScan:
    """Reads one segment. Raises ValueError for a file that is no segment, and the file system's OSError."""

    def __init__(self, directory: Path, name: str, sealed_end: int = 0) -> None:
        """`sealed_end`: where the next segment begins; 0 for the last one."""
        disk = ReadOnlyDisk(directory)
        fd = disk.open(name)
        try:
            base, created = read_segment_header(disk.read(fd, 64, 0))
            segment = Segment(base, name, fd, created)
            segment.sealed_end = sealed_end
            self.facts = Facts(base, base, is_sealed=bool(sealed_end))
            self._entries: list[bytes] = []
            self._counts: list[int] = []
            self._sources: list[int] = []
            self._source_numbers: dict[bytes, int] = {}
            self._group_numbers: dict[str, int] = {}
            self._settled: list[tuple[int, int, int, int, int, int, int, int, int]] = []
            self._checks: list[tuple[bytes, int, bool, int]] = []
            damages: list[Damage] = []
            for frame in walk(disk, segment, base, not sealed_end, damages):
                self.facts.first_us = self.facts.first_us or frame.time_us
                self.facts.last_us, self.facts.end = frame.time_us, frame.end
                self._take(frame.body, frame.base + FRAME_HEADER_SIZE, frame.time_us)
            for damage in damages:
                self._examine(disk, segment, damage)
        finally:
            disk.close(fd)
        table = np.frombuffer(b"".join(self._entries), ENTRY_TYPE)
        sources = np.repeat(np.array(self._sources, np.int32), np.array(self._counts, np.int64))
        self._gather(table, sources)
        rows = [dict(zip(CHECKS.names, check, strict=True)) for check in self._checks]
        self.checks = pa.Table.from_pylist(rows, CHECKS)
        self.facts.messages, self.facts.acks = self.messages.num_rows, self.acks.num_rows
        self.facts.strays = (
            pc.sum(pc.and_(pc.equal(self.messages["outcome"], ROLLED_BACK), self.messages["half_us"].is_null())).as_py()
            or 0
        )
        self.facts.loose = pc.sum(self.acks["is_loose"]).as_py() or 0
        self.facts.consumer_groups = list(self._group_numbers)
        self.facts.sources = self._source_names()

    def _examine(self, disk: Disk, segment: Segment, damage: Damage) -> None:
        if damage.torn:
            return  # being written, or a torn tail: no client was told that it is durable
        # A frame read while it was written looks damaged too, once another frame follows it: read it again.
        again = SegmentReader(disk, segment)
        position = damage.start
        while position < damage.end and (frame := again.frame_at(position)) is not None:
            self._take(frame.body, frame.base + FRAME_HEADER_SIZE, frame.time_us)
            position = frame.end
        if position >= damage.end:
            return
        damage.start = position
        data = disk.read(segment.fd, damage.end - damage.start, damage.start - segment.base)
        for broken in examine(data, damage.start):
            if broken.body is not None:
                self._take(memoryview(broken.body), broken.position + FRAME_HEADER_SIZE, broken.time_us)
            self.facts.broken.append(broken.plain())

    def _take(self, body: memoryview, position: int, time_us: int) -> None:
        """Gather a frame's records, up to the first malformed one, which a damaged frame may have."""
        at, end = 0, len(body)
        unpack = RECORD_HEADER.unpack_from
        while at < end:
            length, kind, _, count = unpack(body, at)
            data_at = at + RECORD_HEADER_SIZE + count * ENTRY_SIZE
            stop = at + length
            if stop > end or data_at > stop:
                return
            if count:
                self._entries.append(bytes(body[at + RECORD_HEADER_SIZE : data_at]))
                self._counts.append(count)
                self._sources.append(self._source_of(body, data_at) if kind in _WITH_PRODUCER else -1)
            if kind in (RecordType.PROGRESS, RecordType.DEAD_LETTER):
                for progress in progressed(kind, body[data_at:stop]):
                    self._progress(progress, time_us, position + at)
            elif kind == RecordType.CHECK:
                answer = check_answered(body[data_at:stop])
                self._checks.append((answer.id, answer.attempts, answer.parked, time_us))
            elif kind == RecordType.META:
                self.facts.meta.append([position + at, time_us, meta.plain(body[data_at:stop])])
            at = stop

    def _source_of(self, body: memoryview, at: int) -> int:
        """A number for the producer (group, source, instance) at the beginning of a record."""
        return self._source_numbers.setdefault(sender_bytes(body, at), len(self._source_numbers))

    def _source_names(self) -> list[str]:
        names = []
        for key in self._source_numbers:
            try:
                names.append(sender_of(key).source)
            except (msgspec.MsgspecError, ValueError):  # the frame is damaged
                names.append("")
        return names

    def _progress(self, record: Progressed, time_us: int, position: int) -> None:
        topic, queue = record.topic, record.queue
        number = self._group_numbers.setdefault(record.group, len(self._group_numbers))
        if isinstance(record.what, str):  # ATTEMPTS
            for offset, attempts, *_ in record.runs:
                self._settled.append((ATTEMPTED, number, topic, queue, offset, 1, attempts, time_us, position))
        else:
            for first, count in record.runs:
                self._settled.append((record.what, number, topic, queue, first, count, 0, time_us, position))

    def _gather(self, table: NDArray[np.void], sources: NDArray[np.int32]) -> None:
        """Make the tables of messages and acks from the segment's entries, in log order."""
        self.messages, row_of = message_rows(table, sources)
        self.acks, entry, rows = self._acks(table)
        count = self.messages.num_rows
        masks = {name: np.zeros(count, np.int64) for name in ("acked", "settled", "attempted")}
        first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        is_here = (entry >= 0) & (rows[:, 1] < MASK_GROUPS)
        at, kinds, groups, times = row_of[entry[is_here]], rows[is_here, 0], rows[is_here, 1], rows[is_here, 7]
        for group in range(min(len(self._group_numbers), MASK_GROUPS)):
            of_group = groups == group
            bit = np.int64(1 << group)
            masks["acked"][at[of_group & (kinds == 0)]] |= bit
            masks["settled"][at[of_group & (kinds != ATTEMPTED)]] |= bit
            masks["attempted"][at[of_group & (kinds == ATTEMPTED)]] |= bit
        acks = kinds == 0
        # Records are in the order of their times, and the last assignment wins.
        first[at[acks][::-1]] = times[acks][::-1]
        last[at[acks]] = times[acks]
        for name, values in (*masks.items(), ("acked_us", first), ("last_acked_us", last)):
            place = MESSAGES.get_field_index(name)
            self.messages = self.messages.set_column(place, MESSAGES.field(place), pa.array(values, mask=values == 0))
        place = ACKS.get_field_index("is_loose")
        self.acks = self.acks.set_column(place, ACKS.field(place), pa.array(~is_here))

    def _acks(self, table: NDArray[np.void]) -> tuple[pa.Table, NDArray[np.int64], NDArray[np.int64]]:
        """The table of acks, with a row for each settled or attempted offset, and its message if this segment has it.

        Also each row's entry number (-1: in another segment), and the rows as numbers (kind, group, …).
        """
        runs = np.array(self._settled, np.int64).reshape(-1, 9)
        counts = runs[:, 5]
        rows = np.repeat(runs, counts, axis=0)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = rows[:, 4] + within
        numbers = np.flatnonzero(table["kind"] == EntryKind.QUEUE)
        queued = table[numbers]
        rows_of_places = places(queued, rows[:, 2] << 16 | rows[:, 3], offset)
        missing = rows_of_places < 0
        hits = queued[np.where(missing, 0, rows_of_places)] if len(queued) else np.zeros(len(rows), ENTRY_TYPE)
        entry = np.where(missing, -1, numbers[np.where(missing, 0, rows_of_places)]) if len(numbers) else rows_of_places
        acks = pa.table(
            [
                ids_of(hits, missing),
                pa.array(hits["message_no"].astype(np.int32), mask=missing),
                pa.array(rows[:, 1].astype(np.int32)),
                pa.array(rows[:, 0].astype(np.int16)),
                pa.array(rows[:, 7]),
                pa.array(hits["time_us"].astype(np.int64), mask=missing),
                pa.array(rows[:, 2]),
                pa.array(rows[:, 3].astype(np.int32)),
                pa.array(offset),
                pa.array(hits["key_hash"].view(np.int64), mask=missing),
                pa.array(rows[:, 6].astype(np.int32)),
                pa.array(rows[:, 8]),
                pa.nulls(len(rows), pa.bool_()),
            ],
            schema=ACKS,
        )
        return acks, entry, rows


_WITH_PRODUCER = (RecordType.HALF, RecordType.MESSAGE)
