"""The index of a finished segment: one file, mapped into memory, read by offset, by transaction id or by time.

Queue entries come first, ordered by (topic, queue, offset), so that a queue's run lies side by side; the other
entries follow. A directory lists the runs, and the ids of all entries are sorted with their entry's number. The
bytes are specified in format.md. The file is a function of the segment: lost, it is built again from the log.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.log.disk import Disk
from storage.log.format import ENTRY_FIELDS, ENTRY_SIZE, EntryKind, crc32c

ENTRY_TYPE = np.dtype(ENTRY_FIELDS)
RUN_TYPE = np.dtype([("key", "<u8"), ("first_offset", "<u8"), ("first_entry", "<u4"), ("count", "<u4")])
ID_TYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("entry", "<u4"), ("reserved", "<u4")])
_U64 = struct.Struct("<Q")
_RUN = struct.Struct("<QQII")
_ID = struct.Struct("<QQI")
_OFFSET_AT = 16
HEADER_TYPE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("crc", "<u4"),  # CRC32C of the directory and the ids
        ("base", "<u8"),
        ("end", "<u8"),
        ("entries", "<u4"),
        ("runs", "<u4"),
        ("id_min_high", "<u8"),
        ("id_max_high", "<u8"),
        ("time_min", "<u8"),
        ("time_max", "<u8"),
    ]
)
MAGIC = b"NTFYIDX1"
assert ENTRY_TYPE.itemsize == ENTRY_SIZE


def index_name(base: int) -> str:
    return f"{base:020d}.idx"


def build(entries: bytes | bytearray | memoryview, base: int, end: int) -> tuple[bytes, memoryview, bytes]:
    """The index file's bytes for a segment's entries in log order, in parts: a copy would be 100 MB and more."""
    table = np.frombuffer(entries, dtype=ENTRY_TYPE)
    queued = table["kind"] == EntryKind.QUEUE
    key = (table["topic"].astype(np.uint64) << np.uint64(16)) | table["queue"]
    # Entries that are in no queue go last; within a queue log order is offset order, but for carried entries.
    order = np.lexsort((table["offset"], key, ~queued))
    table = table[order]
    key = key[order]
    in_queues = int(queued.sum())
    queue_keys = key[:in_queues]
    starts = np.flatnonzero(np.r_[True, queue_keys[1:] != queue_keys[:-1]]) if in_queues else np.empty(0, int)
    runs = np.zeros(len(starts), RUN_TYPE)
    runs["key"] = queue_keys[starts]
    runs["first_offset"] = table["offset"][starts]
    runs["first_entry"] = starts
    runs["count"] = np.diff(np.r_[starts, in_queues])
    ids = np.zeros(len(table), ID_TYPE)
    by_id = np.lexsort((table["id_low"], table["id_high"]))
    ids["high"] = table["id_high"][by_id]
    ids["low"] = table["id_low"][by_id]
    ids["entry"] = by_id
    header = np.zeros(1, HEADER_TYPE)
    header["magic"] = MAGIC
    header["version"] = 1
    header["base"] = base
    header["end"] = end
    header["entries"] = len(table)
    header["runs"] = len(runs)
    if len(table):
        header["id_min_high"] = ids["high"][0]
        header["id_max_high"] = ids["high"][-1]
        header["time_min"] = table["time_us"].min()
        header["time_max"] = table["time_us"].max()
    tail = runs.tobytes() + ids.tobytes()
    header["crc"] = crc32c(tail)
    return header.tobytes(), table.view(np.uint8).data, tail


class SealedPart:
    """A mapped index file. Raises ValueError on opening if it is not sound."""

    def __init__(self, disk: Disk, name: str) -> None:
        self.name = name
        path = Path(disk.directory) / name
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._map) < HEADER_TYPE.itemsize:
            raise ValueError("shorter than its header")
        header = np.frombuffer(self._map, HEADER_TYPE, 1)[0]
        if bytes(header["magic"]) != MAGIC or header["version"] != 1:
            raise ValueError("not an index of this version")
        self.base, self.end = int(header["base"]), int(header["end"])
        count, runs = int(header["entries"]), int(header["runs"])
        at = HEADER_TYPE.itemsize
        if len(self._map) != at + count * (ENTRY_SIZE + ID_TYPE.itemsize) + runs * RUN_TYPE.itemsize:
            raise ValueError("its length does not fit its header")
        self.entries: NDArray[np.void] = np.frombuffer(self._map, ENTRY_TYPE, count, at)
        self._entries_at = at
        at += count * ENTRY_SIZE
        if crc32c(self._map[at:]) != int(header["crc"]):
            raise ValueError("its directory is damaged (checksum)")
        self.runs: NDArray[np.void] = np.frombuffer(self._map, RUN_TYPE, runs, at)
        self._runs_at = at
        self._ids_at = at + runs * RUN_TYPE.itemsize
        self.id_min = int(header["id_min_high"])
        self.id_max = int(header["id_max_high"])
        self.time_max = int(header["time_max"])
        self.count = count

    def close(self) -> None:
        """Let go of the file; nothing may be read any more."""
        del self.entries, self.runs
        self._map.close()

    def _first_at_least(self, value: int, at: int, stride: int, low: int, high: int) -> int:
        """The first of the rows [low, high) whose u64 is `value` or more; they rise, the one of row 0 is at `at`.

        By hand: numpy would copy the whole column first, because it is not contiguous.
        """
        read = _U64.unpack_from
        mapped = self._map
        while low < high:
            middle = (low + high) >> 1
            if read(mapped, at + middle * stride)[0] < value:
                low = middle + 1
            else:
                high = middle
        return low

    def _run(self, key: int) -> tuple[int, int, int] | None:
        """First offset, first entry and number of entries of a queue."""
        size = RUN_TYPE.itemsize
        i = self._first_at_least(key, self._runs_at, size, 0, len(self.runs))
        if i == len(self.runs):
            return None
        found, first_offset, first_entry, count = _RUN.unpack_from(self._map, self._runs_at + i * size)
        return (first_offset, first_entry, count) if found == key else None

    def first_offset(self, key: int) -> int | None:
        run = self._run(key)
        return None if run is None else run[0]

    def read(self, key: int, offset: int, limit: int) -> bytes:
        """Entries of a queue from `offset` on, joined; empty if this part has none."""
        run = self._run(key)
        if run is None:
            return b""
        first_offset, first, count = run
        at = max(0, offset - first_offset)
        if at and (at >= count or self._offset(first + at) != offset):
            # Carried entries leave gaps: search instead of counting.
            at = self._first_at_least(offset, self._entries_at + _OFFSET_AT, ENTRY_SIZE, first, first + count) - first
        start = self._entries_at + (first + at) * ENTRY_SIZE
        return self._map[start : start + min(limit, count - at) * ENTRY_SIZE]

    def _offset(self, entry: int) -> int:
        offset: int = _U64.unpack_from(self._map, self._entries_at + entry * ENTRY_SIZE + _OFFSET_AT)[0]
        return offset

    def lookup(self, transaction_id: bytes) -> list[bytes]:
        """Every entry of a transaction."""
        high = int.from_bytes(transaction_id[:8])
        if not self.id_min <= high <= self.id_max or not self.count:
            return []
        low = int.from_bytes(transaction_id[8:])
        found = []
        size = ID_TYPE.itemsize
        for i in range(self._first_at_least(high, self._ids_at, size, 0, self.count), self.count):
            its_high, its_low, entry = _ID.unpack_from(self._map, self._ids_at + i * size)
            if its_high != high:
                break
            if its_low == low:
                at = self._entries_at + entry * ENTRY_SIZE
                found.append(self._map[at : at + ENTRY_SIZE])
        return found

    def outcome(self, transaction_id: bytes) -> bool | None:
        """True committed, False rolled back, None not decided in this part."""
        for entry in self.lookup(transaction_id):
            if entry[0] in (EntryKind.QUEUE, EntryKind.DELAYED):
                return True
            if entry[0] == EntryKind.ROLLBACK:
                return False
        return None
