"""The index of a finished segment, mapped into memory: read by offset, by id, by key or by due time."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from notify.storage.log.disk import Disk
from notify.storage.log.entry import (
    ENTRY_SIZE,
    ENTRY_TYPE,
    NUMBER_AT,
    OFFSET_AT,
    EntryKind,
    due_times,
    group_number_of,
    is_delayed,
)
from notify.storage.log.index import (
    DUE_TYPE,
    HEADER_TYPE,
    ID_TYPE,
    KEY_TYPE,
    MAGIC,
    RUN_TYPE,
    VERSION,
    crc_of,
    view,
)

log = structlog.get_logger("notify.log")

ABOVE_ALL = 1 << 64
"""Above all positions."""

COMMITTED = frozenset({EntryKind.QUEUE, EntryKind.DELAYED, EntryKind.GONE, EntryKind.WITHDRAWN, EntryKind.WITHDRAWAL})
"""The kinds of entries that only committed transactions have."""

_U64 = struct.Struct("<Q")
_RUN = struct.Struct("<QQIIQ")
_ID = struct.Struct("<QQI")
_DUE = struct.Struct("<QQI")
_KEY = struct.Struct("<QI")


class SealedPart:
    """A mapped index file. Opening raises ValueError if it is invalid."""

    def __init__(self, disk: Disk, name: str, *, is_fresh: bool = False) -> None:
        """`is_fresh`: whether this process has just written it, so that its tables need no check."""
        self.name = name
        path = Path(disk.directory) / name
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._map) < HEADER_TYPE.itemsize:
            raise ValueError("shorter than its header")
        header = np.frombuffer(self._map, HEADER_TYPE, 1)[0]
        if bytes(header["magic"]) != MAGIC or header["version"] != VERSION:
            raise ValueError("not an index of this version")
        self.base, self.end = int(header["base"]), int(header["end"])
        self.count = count = int(header["entries"])
        self.delayed_count = int(header["delayed"])
        self.keyed_count = int(header["keyed"])
        runs = int(header["runs"])
        self._entries_at = HEADER_TYPE.itemsize
        self._runs_at = self._entries_at + count * ENTRY_SIZE
        self._ids_at = self._runs_at + runs * RUN_TYPE.itemsize
        self._delayed_at = self._ids_at + count * ID_TYPE.itemsize
        self._keys_at = self._delayed_at + self.delayed_count * DUE_TYPE.itemsize
        if len(self._map) != self._keys_at + self.keyed_count * KEY_TYPE.itemsize:
            raise ValueError("its length does not fit its header")
        self.entries: NDArray[np.void] = np.frombuffer(self._map, ENTRY_TYPE, count, self._entries_at)
        self.runs: NDArray[np.void] = np.frombuffer(self._map, RUN_TYPE, runs, self._runs_at)
        if crc_of(view(self.runs)) != int(header["runs_crc"]):
            raise ValueError("its directory is damaged (checksum)")
        self._tables_crc = int(header["tables_crc"])
        self._is_sound: bool | None = True if is_fresh else None
        self._lowest_payload: int | None = None
        self._withdrawn_due: NDArray[np.uint64] | None = None
        self.id_min = int(header["id_min_high"])
        self.id_max = int(header["id_max_high"])
        self.time_min = int(header["time_min"])
        self.time_max = int(header["time_max"])

    def close(self) -> None:
        """Close the file. Nothing may be read after that."""
        del self.entries, self.runs
        self._map.close()

    def lowest_payload(self) -> int:
        """The lowest position of a payload that an entry in a queue points at; ABOVE_ALL if there is none.

        It is computed once, because each dropped segment asks every later one.
        """
        if self._lowest_payload is None:
            positions = self.entries["position"][self.entries["kind"] == EntryKind.QUEUE]
            self._lowest_payload = int(positions.min()) if len(positions) else ABOVE_ALL
        return self._lowest_payload

    def _tables_are_sound(self) -> bool:
        """Whether the tables of ids, due times and keys are intact; checked once, on their first use.

        Otherwise a start would have to read at least 24 bytes of every entry in the log.
        """
        if self._is_sound is None:
            self._is_sound = crc_of(memoryview(self._map)[self._ids_at :]) == self._tables_crc
            if not self._is_sound:
                log.error(
                    "index_damaged",
                    name=self.name,
                    effect="its entries are searched one by one; remove the "
                    "file and start again: it is rebuilt from the log",
                )
        return self._is_sound

    def _first_at_least(self, value: int, at: int, stride: int, low: int, high: int) -> int:
        """The first of the rows [low, high) whose u64 is at least `value`; the values rise, and row 0's is at `at`.

        numpy would first copy the whole column, because it is not contiguous.
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

    def _run(self, key: int) -> tuple[int, int, int, int] | None:
        """First offset, first entry, number of entries and payload bytes of a queue."""
        size = RUN_TYPE.itemsize
        i = self._first_at_least(key, self._runs_at, size, 0, len(self.runs))
        if i == len(self.runs):
            return None
        found, first_offset, first_entry, count, size = _RUN.unpack_from(self._map, self._runs_at + i * size)
        return (first_offset, first_entry, count, size) if found == key else None

    def bytes_of(self, key: int) -> int:
        """Payload bytes of a queue's entries in this part."""
        run = self._run(key)
        return 0 if run is None else run[3]

    def first_offset(self, key: int) -> int | None:
        run = self._run(key)
        return None if run is None else run[0]

    def read(self, key: int, offset: int, limit: int) -> bytes:
        """Entries of a queue from `offset` on, joined; empty if this part has none."""
        run = self._run(key)
        if run is None:
            return b""
        first_offset, first, count, _ = run
        at = max(0, offset - first_offset)
        if at and (at >= count or self._offset(first + at) != offset):
            # Carried entries leave gaps: search instead of counting.
            at = self._first_at_least(offset, self._entries_at + OFFSET_AT, ENTRY_SIZE, first, first + count) - first
        start = self._entries_at + (first + at) * ENTRY_SIZE
        return self._map[start : start + min(limit, count - at) * ENTRY_SIZE]

    def _offset(self, entry: int) -> int:
        offset: int = _U64.unpack_from(self._map, self._entries_at + entry * ENTRY_SIZE + OFFSET_AT)[0]
        return offset

    def lookup(self, transaction_id: bytes) -> list[bytes]:
        """Every entry of a transaction."""
        high = int.from_bytes(transaction_id[:8])
        if not self.id_min <= high <= self.id_max or not self.count:
            return []
        low = int.from_bytes(transaction_id[8:])
        if not self._tables_are_sound():
            same = (self.entries["id_high"] == np.uint64(high)) & (self.entries["id_low"] == np.uint64(low))
            return [self._entry(int(n)) for n in np.flatnonzero(same)]
        found = []
        size = ID_TYPE.itemsize
        for i in range(self._first_at_least(high, self._ids_at, size, 0, self.count), self.count):
            its_high, its_low, entry = _ID.unpack_from(self._map, self._ids_at + i * size)
            if its_high != high:
                break
            if its_low == low:
                found.append(self._entry(entry))
        return found

    def _entry(self, number: int) -> bytes:
        at = self._entries_at + number * ENTRY_SIZE
        return self._map[at : at + ENTRY_SIZE]

    def keyed(self, key_hash: int) -> list[bytes]:
        """Every queue entry of a key, by its hash, in any order."""
        if not self.keyed_count:
            return []
        if not self._tables_are_sound():
            same = (self.entries["key_hash"] == np.uint64(key_hash)) & (self.entries["kind"] == EntryKind.QUEUE)
            return [self._entry(int(n)) for n in np.flatnonzero(same)]
        size = KEY_TYPE.itemsize
        found = []
        for i in range(self._first_at_least(key_hash, self._keys_at, size, 0, self.keyed_count), self.keyed_count):
            its_hash, entry = _KEY.unpack_from(self._map, self._keys_at + i * size)
            if its_hash != key_hash:
                break
            found.append(self._entry(entry))
        return found

    def delayed_after(self, due_us: int, position: int, until_us: int, limit: int) -> list[tuple[int, int, int]]:
        """(due, payload position, entry number) of delayed messages after a point in due order, up to an instant."""
        if not self.delayed_count:
            return []
        if not self._tables_are_sound():
            numbers = np.flatnonzero(is_delayed(self.entries["kind"]))
            rows = sorted(
                zip(
                    due_times(self.entries[numbers]).tolist(),
                    self.entries["position"][numbers].tolist(),
                    numbers.tolist(),
                    strict=True,
                )
            )
            return [row for row in rows if (due_us, position) < row[:2] and row[0] <= until_us][:limit]
        size = DUE_TYPE.itemsize
        at = self._first_at_least(due_us, self._delayed_at, size, 0, self.delayed_count)
        found: list[tuple[int, int, int]] = []
        while at < self.delayed_count and len(found) < limit:
            row = _DUE.unpack_from(self._map, self._delayed_at + at * size)
            if row[0] > until_us:
                break
            if row[:2] > (due_us, position):
                found.append(row)
            at += 1
        return found

    def delayed_count_until(self, until_us: int) -> int:
        """How many delayed messages, including released ones, were due up to an instant."""
        if not self.delayed_count or not self._tables_are_sound():
            return self.delayed_count
        return self._first_at_least(until_us + 1, self._delayed_at, DUE_TYPE.itemsize, 0, self.delayed_count)

    def withdrawn_count_until(self, until_us: int) -> int:
        """How many messages due up to an instant were withdrawn here. Computed once, because it no longer changes."""
        if not self.delayed_count:
            return 0
        if self._withdrawn_due is None:
            rows = np.frombuffer(self._map, DUE_TYPE, self.delayed_count, self._delayed_at)
            kinds = self.entries["kind"][rows["entry"]]
            self._withdrawn_due = rows["due_us"][kinds == EntryKind.WITHDRAWN].copy()
        return int(np.searchsorted(self._withdrawn_due, np.uint64(until_us), side="right"))

    def delayed_of(self, transaction_id: bytes, number: int) -> tuple[bytes, bytes]:
        """The entries of one message as delayed and as withdrawn; each empty if it is not here."""
        delayed = withdrawn = b""
        for entry in self.lookup(transaction_id):
            if int.from_bytes(entry[NUMBER_AT : NUMBER_AT + 2], "little") == number:
                if entry[0] == EntryKind.DELAYED:
                    delayed = entry
                elif entry[0] == EntryKind.WITHDRAWN:
                    withdrawn = entry
        return delayed, withdrawn

    def delayed_entry(self, number: int) -> bytes:
        """The entry of a delayed message."""
        return self._entry(number)

    def group_number(self, transaction_id: bytes) -> int:
        """The number of the producer group of a transaction with entries here; 0: unknown."""
        numbers = map(group_number_of, self.lookup(transaction_id))
        return next((number for number in numbers if number), 0)

    def outcome(self, transaction_id: bytes) -> bool | None:
        """True committed, False rolled back, None not decided in this part."""
        for entry in self.lookup(transaction_id):
            if entry[0] in COMMITTED:
                return True
            if entry[0] == EntryKind.ROLLBACK:
                return False
        return None
