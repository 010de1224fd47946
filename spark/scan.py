"""Reads a whole segment of the log into columns: its messages, what groups did with them, and its damage.

Python verifies the frames, one for each group commit; numpy gathers their entries. A half and its outcome in one
segment become one row, and settled offsets get the ids of their messages. So only rows of different segments are left
to join.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from notify.spark.damage import examine
from notify.storage.log import meta
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_SIZE, ENTRY_TYPE, EntryKind, due_times
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

ATTEMPTED = 100
"""A value of the column `kind` of acks: to be delivered again, not settled. Other values are those of SettleKind."""
COMMITTED, ROLLED_BACK = 1, 2

MESSAGES = pa.schema(
    [
        ("id", pa.binary()),
        ("no", pa.int32()),
        ("producer_group", pa.int32()),  # number of its name; 0: sent without a transaction
        ("source", pa.int32()),  # number of the half's database in the segment's list; -1: unknown
        ("half_us", pa.int64()),  # when the half was stored
        ("outcome", pa.int8()),  # 1 COMMITTED, 2 ROLLED_BACK, 0 none in this segment
        ("decided_us", pa.int64()),
        ("due_us", pa.int64()),  # when a delayed message is due
        ("queued_us", pa.int64()),
        ("topic", pa.int64()),  # number of its name; the half's topic if the message is in no queue
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("key_hash", pa.int64()),
        ("size", pa.int32()),
        ("position", pa.int64()),  # of the payload in the log
        # Each group's progress with the message in this segment: bit n stands for the segment's nth consumer group.
        ("acked", pa.int64()),
        ("settled", pa.int64()),
        ("attempted", pa.int64()),
        ("acked_us", pa.int64()),
        ("last_acked_us", pa.int64()),
    ]
)
ACKS = pa.schema(
    [
        ("id", pa.binary()),  # null if the message is in another segment
        ("no", pa.int32()),
        ("consumer_group", pa.int32()),  # number in the segment's list
        ("kind", pa.int16()),
        ("at_us", pa.int64()),
        ("queued_us", pa.int64()),
        ("topic", pa.int64()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("key_hash", pa.int64()),
        ("attempts", pa.int32()),
        ("seq", pa.int64()),  # position of the record: the order of events
        ("is_loose", pa.bool_()),  # whether the columns acked, settled, … of messages lack this row
    ]
)
CHECKS = pa.schema([("id", pa.binary()), ("answered", pa.int32()), ("parked", pa.bool_()), ("at_us", pa.int64())])
"""Answers to checks that left the transaction undecided."""
MASK_GROUPS = 62
QUEUE = pa.schema(
    [MESSAGES.field(n) for n in ("id", "no", "producer_group", "topic", "queue", "offset", "queued_us")]
    + [MESSAGES.field(n) for n in ("key_hash", "size", "position")]
)
"""The queues as the index has them: a row for each place of a message."""

_SPARK_TYPES = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}


def spark_schema(fields: Iterable[pa.Field]) -> str:
    """Arrow fields as a schema of Spark."""
    return ", ".join(f"{f.name} {_SPARK_TYPES.get(str(f.type), str(f.type))}" for f in fields)


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
        self.messages, row_of = _messages(table, sources)
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
        places = _places(queued, rows[:, 2] << 16 | rows[:, 3], offset)
        missing = places < 0
        hits = queued[np.where(missing, 0, places)] if len(queued) else np.zeros(len(rows), ENTRY_TYPE)
        entry = np.where(missing, -1, numbers[np.where(missing, 0, places)]) if len(numbers) else places
        acks = pa.table(
            [
                _ids(hits, missing),
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


def _places(queued: NDArray[np.void], keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row in `queued` of each (topic << 16 | queue, offset); -1 if there is none."""
    if not len(queued) or not len(keys):
        return np.full(len(keys), -1, np.int64)
    own = queued["topic"].astype(np.int64) << 16 | queued["queue"]
    order = np.lexsort((queued["offset"], own))
    own, at = own[order], queued["offset"][order].astype(np.int64)
    starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
    counts = np.diff(np.r_[starts, len(own)])
    run = np.minimum(np.searchsorted(own[starts], keys), len(starts) - 1)
    # The offsets of a queue are contiguous except for holes; after a hole the row is before the guessed place.
    guess = starts[run] + np.clip(offsets - at[starts[run]], 0, counts[run] - 1)
    is_match = (own[guess] == keys) & (at[guess] == offsets)
    for row in np.flatnonzero(~is_match & (own[starts[run]] == keys)).tolist():
        first = int(starts[run[row]])
        place = first + int(np.searchsorted(at[first : first + int(counts[run[row]])], offsets[row]))
        if place < len(at) and own[place] == keys[row] and at[place] == offsets[row]:
            guess[row], is_match[row] = place, True
    return np.where(is_match, order[guess], -1)


def queue_of(entries: NDArray[np.void], columns: Sequence[str]) -> pa.Table:
    """Columns of QUEUE for the index entries of queues."""
    rows = entries[entries["kind"] == EntryKind.QUEUE]
    arrays = []
    for name in columns:
        if name == "id":
            arrays.append(_ids(rows, None))
        elif name == "key_hash":
            arrays.append(pa.array(rows["key_hash"].view(np.int64)))
        else:
            column = rows[{"no": "message_no", "queued_us": "time_us"}.get(name, name)]
            arrays.append(pa.array(column).cast(QUEUE.field(name).type))
    return pa.table(arrays, schema=pa.schema([QUEUE.field(name) for name in columns]))


def messages_of(entries: NDArray[np.void]) -> pa.Table:
    """The table of messages from index entries alone, without what groups settled."""
    return _messages(entries, np.full(len(entries), -1, np.int32))[0]


def _messages(table: NDArray[np.void], sources: NDArray[np.int32]) -> tuple[pa.Table, NDArray[np.int64]]:
    """One row for each message, with its half, outcome and place if these entries have them; and each entry's row.

    A message that is in several queues, or twice in one, has a row for each place. A rollback whose half is in another
    segment has one row, number 0, without `half_us`.
    """
    chosen = np.flatnonzero(np.isin(table["kind"], _OF_MESSAGES))
    row_of = np.full(len(table), -1, np.int64)
    table, sources = table[chosen], sources[chosen]
    rank = _RANK[table["kind"]]
    order = np.lexsort((rank, table["message_no"], table["id_low"], table["id_high"]))
    table, sources = table[order], sources[order]
    new_id = np.ones(len(table), bool)
    new_id[1:] = (table["id_high"][1:] != table["id_high"][:-1]) | (table["id_low"][1:] != table["id_low"][:-1])
    new = new_id.copy()
    new[1:] |= table["message_no"][1:] != table["message_no"][:-1]
    kind = table["kind"]
    queued = kind == EntryKind.QUEUE
    # A message's second place is a row of its own.
    new[1:] |= queued[1:] & queued[:-1]
    row = np.cumsum(new) - 1
    row_of[chosen[order]] = row
    rows = int(row[-1]) + 1 if len(row) else 0
    first = np.flatnonzero(new)
    base = table[first]
    half = kind == EntryKind.HALF
    delayed = kind == EntryKind.DELAYED
    rolled = kind == EntryKind.ROLLBACK
    transaction = np.cumsum(new_id) - 1
    is_rolled = np.zeros(int(transaction[-1]) + 1 if len(row) else 0, bool)
    is_rolled[transaction[rolled]] = True
    rolled_us = np.zeros(len(is_rolled), np.int64)
    rolled_us[transaction[rolled]] = table["time_us"][rolled]

    def column(mask: NDArray[np.bool_], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        filled = np.zeros(rows, np.int64)
        missing = np.ones(rows, bool)
        filled[row[mask]] = values[mask]
        missing[row[mask]] = False
        return filled, missing

    half_us, no_half = column(half, table["time_us"])
    queued_us, no_queue = column(queued, table["time_us"])
    offset, _ = column(queued, table["offset"])
    due_us, not_delayed = column(delayed, due_times(table))
    committed_us, not_committed = column(delayed | queued, table["time_us"])
    delayed_us, _ = column(delayed, table["time_us"])
    committed_us = np.where(not_delayed, committed_us, delayed_us)
    has_rolled_back = is_rolled[transaction[first]] & not_committed
    decided_us = np.where(has_rolled_back, rolled_us[transaction[first]], committed_us)
    outcome = np.where(has_rolled_back, ROLLED_BACK, np.where(not_committed, 0, COMMITTED)).astype(np.int8)
    source = sources[first]
    messages = pa.table(
        [
            _ids(base, None),
            pa.array(base["message_no"].astype(np.int32)),
            pa.array(base["producer_group"].astype(np.int32)),
            pa.array(source),
            pa.array(half_us, mask=no_half),
            pa.array(outcome),
            pa.array(decided_us, mask=outcome == 0),
            pa.array(due_us, mask=not_delayed),
            pa.array(queued_us, mask=no_queue),
            pa.array(base["topic"].astype(np.int64)),
            pa.array(base["queue"].astype(np.int32)),
            pa.array(offset, mask=no_queue),
            pa.array(base["key_hash"].view(np.int64)),
            pa.array(base["size"].astype(np.int32)),
            pa.array(base["position"].astype(np.int64)),
            *[pa.nulls(rows, pa.int64()) for _ in range(5)],
        ],
        schema=MESSAGES,
    )
    return messages, row_of


_OF_MESSAGES = [int(k) for k in (EntryKind.HALF, EntryKind.QUEUE, EntryKind.ROLLBACK, EntryKind.DELAYED)]
_RANK = np.zeros(256, np.uint8)
_RANK[[EntryKind.DELAYED, EntryKind.ROLLBACK, EntryKind.QUEUE]] = [1, 2, 3]


def _ids(rows: NDArray[np.void], missing: NDArray[np.bool_] | None) -> pa.Array:
    """Transaction ids as binary values of 16 bytes, made without a Python object for each."""
    data = np.empty((len(rows), 2), ">u8")
    data[:, 0], data[:, 1] = rows["id_high"], rows["id_low"]
    ends = pa.py_buffer(np.arange(0, 16 * len(rows) + 1, 16, dtype=np.int32))
    valid = None
    if missing is not None:
        valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(rows), [valid, ends, pa.py_buffer(data)])
