"""Writes the messages that a segment put into queues as a Parquet table, in the order of topic, queue, offset.

| column | type | |
|---|---|---|
| `id` | string | the message's id, `{transaction}.{n}` |
| `topic` | string | the topic's name |
| `topic_number` | int32 | its number in the log, which changes if it is deleted and made again |
| `queue` | int32 | |
| `offset` | int64 | in the queue |
| `committed_at` | timestamp (µs, UTC) | when the commit was recorded |
| `key`, `tag` | string | null if the message has none |
| `headers` | map of string to string | null if the message has none |
| `body` | binary | null if the payload could not be read |

Row groups have at most ROWS messages and about GROUP_BYTES of payload, so that the memory of writers and readers is
bounded for any segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from notify.protocol.ids import message_id
from notify.protocol.wire import Payload, decode_payload
from notify.storage.log.entry import EntryKind
from notify.storage.log.format import crc32c

ROWS = 20_000
GROUP_BYTES = 16 << 20
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("topic_number", pa.int32(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.string())),
        pa.field("body", pa.binary()),
    ]
)

Read = Callable[[int, int], bytes]
"""Reads (position, size) from the log; fewer bytes if they cannot be read."""


def write_messages(entries: NDArray[np.void], topics: dict[int, str], read: Read, file: Any) -> int:
    """Write the table of a sealed index's entries to a file; returns how many payloads could not be read."""
    queued = int((entries["kind"] == EntryKind.QUEUE).sum())
    unreadable = 0
    with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for first, end in _groups(entries["size"][:queued]):
            columns, missing = _columns(entries[first:end], topics, read)
            unreadable += missing
            writer.write_table(pa.table(columns, schema=SCHEMA), row_group_size=end - first)
    return unreadable


def _groups(sizes: NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
    """The beginning and the end of each row group; each has at least one message."""
    behind = np.cumsum(sizes, dtype=np.uint64)
    first = 0
    while first < len(sizes):
        before = int(behind[first - 1]) if first else 0
        end = int(np.searchsorted(behind, before + GROUP_BYTES, side="right"))
        end = max(first + 1, min(end, first + ROWS))
        yield first, end
        first = end


def _columns(entries: NDArray[np.void], topics: dict[int, str], read: Read) -> tuple[list[pa.Array], int]:
    """The columns of some entries, and how many payloads could not be read."""
    payloads = [
        _payload(read, position, size, crc)
        for position, size, crc in zip(
            entries["position"].tolist(), entries["size"].tolist(), entries["payload_crc"].tolist(), strict=True
        )
    ]
    known = [payload if payload is not None else _NOTHING for payload in payloads]
    columns = [
        pa.array(map(message_id, _ids(entries), entries["message_no"].tolist()), pa.string()),
        pa.array([topics.get(number, f"#{number}") for number in entries["topic"].tolist()], pa.string()),
        pa.array(entries["topic"].astype(np.int32)),
        pa.array(entries["queue"].astype(np.int32)),
        pa.array(entries["offset"].astype(np.int64)),
        pa.array(entries["time_us"].astype(np.int64)).cast(pa.timestamp("us", tz="UTC")),
        pa.array([payload.key for payload in known], pa.string()),
        pa.array([payload.tag for payload in known], pa.string()),
        pa.array(
            [payload.headers and list(payload.headers.items()) for payload in known], SCHEMA.field("headers").type
        ),
        pa.array([payload.body if payload is not None else None for payload in payloads], pa.binary()),
    ]
    return columns, payloads.count(None)


_NOTHING = Payload("", b"")


def _payload(read: Read, position: int, size: int, crc: int) -> Payload | None:
    data = read(position, size)
    return decode_payload(data) if len(data) == size and crc32c(data) == crc else None


def _ids(entries: NDArray[np.void]) -> Iterator[bytes]:
    """The transaction id of each entry, 16 bytes."""
    packed = np.empty(len(entries), np.dtype([("high", ">u8"), ("low", ">u8")]))
    packed["high"], packed["low"] = entries["id_high"], entries["id_low"]
    data = packed.tobytes()
    return (data[at : at + 16] for at in range(0, len(data), 16))
