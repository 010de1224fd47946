"""The bytes of a finished segment's index file, made from the segment's entries. Described in format.md.

Queue entries come first, ordered by (topic, queue, offset), so that a queue's entries are adjacent; the other
entries follow. Then come the runs and three sorted tables: the ids of all entries, the delayed messages by
due time, the keys of queue entries. The file depends only on the segment: if it is lost, it is rebuilt from the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from notify.storage.log.entry import EntryKind, due_times, is_delayed, queue_keys, table_of

MAGIC = b"NTFYIDX1"
VERSION = 2
HEADER_TYPE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("runs_crc", "<u4"),  # CRC32C of the runs, checked when the file is opened
        ("base", "<u8"),
        ("end", "<u8"),
        ("entries", "<u4"),
        ("runs", "<u4"),
        ("delayed", "<u4"),
        ("keyed", "<u4"),
        ("id_min_high", "<u8"),
        ("id_max_high", "<u8"),
        ("time_min", "<u8"),
        ("time_max", "<u8"),
        ("tables_crc", "<u4"),  # CRC32C of ids, due times and keys, checked when one of them is first searched
        ("reserved", "<u4"),
    ]
)
RUN_TYPE = np.dtype(
    [("key", "<u8"), ("first_offset", "<u8"), ("first_entry", "<u4"), ("count", "<u4"), ("bytes", "<u8")]
)
ID_TYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("entry", "<u4"), ("reserved", "<u4")])
DUE_TYPE = np.dtype([("due_us", "<u8"), ("position", "<u8"), ("entry", "<u4"), ("reserved", "<u4")])
KEY_TYPE = np.dtype([("key_hash", "<u8"), ("entry", "<u4"), ("reserved", "<u4")])
_CHUNK_ROWS = 65_536
_CRC_BYTES = 1 << 20


def index_name(base: int) -> str:
    return f"{base:020d}.idx"


def build(entries: bytes | bytearray | memoryview, base: int, end: int) -> Iterator[bytes | memoryview]:
    """The index file's bytes for a segment's entries in log order, piece by piece, because copies would take 100 MB."""
    table = table_of(entries)
    queued = table["kind"] == EntryKind.QUEUE
    key = queue_keys(table)
    # Entries outside queues go last. Within a queue log order is offset order, except for carried entries.
    order = np.lexsort((table["offset"], key, ~queued)).astype(np.uint32)
    in_queues = int(queued.sum())
    runs = _runs(table, key, order[:in_queues])
    del key, queued
    place = np.empty(len(table), np.uint32)
    place[order] = np.arange(len(table), dtype=np.uint32)
    ids = _ids(table, place)
    delayed = _delayed(table, place)
    keys = _keys(table, place)
    del place
    header = np.zeros(1, HEADER_TYPE)
    header["magic"] = MAGIC
    header["version"] = VERSION
    header["base"] = base
    header["end"] = end
    header["entries"] = len(table)
    header["runs"] = len(runs)
    header["delayed"] = len(delayed)
    header["keyed"] = len(keys)
    if len(table):
        header["id_min_high"] = ids["high"][0]
        header["id_max_high"] = ids["high"][-1]
        header["time_min"] = table["time_us"].min()
        header["time_max"] = table["time_us"].max()
    header["runs_crc"] = crc_of(view(runs))
    header["tables_crc"] = crc_of(view(ids), view(delayed), view(keys))
    yield view(header)
    for first in range(0, len(order), _CHUNK_ROWS):
        yield view(table[order[first : first + _CHUNK_ROWS]])
    yield from (view(runs), view(ids), view(delayed), view(keys))


def view(table: NDArray[Any]) -> memoryview | bytes:
    return table.view(np.uint8).data if len(table) else b""


def crc_of(*views: memoryview | bytes) -> int:
    """CRC32C of all pieces, one at a time, because the library takes only bytes."""
    crc = 0
    for view in views:
        for at in range(0, len(view), _CRC_BYTES):
            crc = google_crc32c.extend(crc, bytes(view[at : at + _CRC_BYTES]))
    return crc


def _runs(table: NDArray[Any], key: NDArray[np.uint64], order: NDArray[np.uint32]) -> NDArray[Any]:
    """The place of each queue's entries, and how many payload bytes they have."""
    keys = key[order]
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(order) else np.empty(0, int)
    runs = np.zeros(len(starts), RUN_TYPE)
    runs["key"] = keys[starts]
    runs["first_offset"] = table["offset"][order[starts]]
    runs["first_entry"] = starts
    runs["count"] = np.diff(np.r_[starts, len(order)])
    if len(starts):
        runs["bytes"] = np.add.reduceat(table["size"][order].astype(np.uint64), starts)
    return runs


def _ids(table: NDArray[Any], place: NDArray[np.uint32]) -> NDArray[Any]:
    by_id = np.lexsort((table["id_low"], table["id_high"]))
    ids = np.zeros(len(table), ID_TYPE)
    ids["high"] = table["id_high"][by_id]
    ids["low"] = table["id_low"][by_id]
    ids["entry"] = place[by_id]
    return ids


def _delayed(table: NDArray[Any], place: NDArray[np.uint32]) -> NDArray[Any]:
    numbers = np.flatnonzero(is_delayed(table["kind"]))
    chosen = table[numbers]
    due = due_times(chosen)
    order = np.lexsort((chosen["position"], due))
    delayed = np.zeros(len(numbers), DUE_TYPE)
    delayed["due_us"] = due[order]
    delayed["position"] = chosen["position"][order]
    delayed["entry"] = place[numbers[order]]
    return delayed


def _keys(table: NDArray[Any], place: NDArray[np.uint32]) -> NDArray[Any]:
    numbers = np.flatnonzero((table["kind"] == EntryKind.QUEUE) & (table["key_hash"] != 0))
    hashes = table["key_hash"][numbers]
    order = np.argsort(hashes, kind="stable")
    keys = np.zeros(len(numbers), KEY_TYPE)
    keys["key_hash"] = hashes[order]
    keys["entry"] = place[numbers[order]]
    return keys
