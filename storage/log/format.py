"""The bytes of the log, stated once: segment and frame headers, records, index entries. Prose: format.md.

All integers are little-endian. A position is a byte address in the log as a whole; a segment's file is named by
the position of its first byte.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable

import google_crc32c

FORMAT_VERSION = 1

# Segment header: magic, version, reserved, base position, created (microseconds), CRC32C of the bytes before it.
SEGMENT_MAGIC = b"NTFYSEG1"
SEGMENT_HEADER = struct.Struct("<8sIIQQI28x")
SEGMENT_HEADER_SIZE = 64
assert SEGMENT_HEADER.size == SEGMENT_HEADER_SIZE

# Frame header: magic, body length, CRC32C over the rest of the header and the body, records, base position,
# durable mark, time (microseconds).
FRAME_MAGIC = b"NFR1"
FRAME_HEADER = struct.Struct("<4sIIIQQQ")
FRAME_HEADER_SIZE = 40
assert FRAME_HEADER.size == FRAME_HEADER_SIZE
_FRAME_CHECKED = struct.Struct("<IIQQQ")  # what the CRC covers before the body: all but the magic and itself

# Record header: length with this header, type, flags, number of index entries that follow it.
RECORD_HEADER = struct.Struct("<IBBH")
RECORD_HEADER_SIZE = 8


class RecordType(enum.IntEnum):
    HALF = 1
    OUTCOME = 2
    MESSAGE = 3  # stored as committed at once
    RELEASE = 4  # a delayed message came due
    PROGRESS = 5
    DEAD_LETTER = 6
    META = 7  # topics and subscriptions
    CHECK = 8
    CARRY = 9  # a live payload of an expiring segment, written again


class EntryKind(enum.IntEnum):
    HALF = 1
    QUEUE = 2
    ROLLBACK = 3
    DELAYED = 4  # committed, not due yet
    CARRY = 5
    GONE = 6  # was in a queue whose room or time is over; only in sealed indexes, for its id


# An index entry is 80 bytes in two parts. What changes between a half and its place in a queue comes first:
# kind, flags, queue, topic, time (of the record, microseconds), queue offset.
ENTRY_HEAD = struct.Struct("<BBHIQQ")
# The part that the half fixes: payload position, payload size, message number, producer group, deliver at
# (microseconds; with FLAG_DELAY a delay that counts from the commit), transaction id, tag hash, payload CRC32C,
# key hash.
ENTRY_TAIL = struct.Struct("<QIHHQ16sIIQ")
ENTRY = struct.Struct("<BBHIQQQIHHQ16sIIQ")
ENTRY_HEAD_SIZE = 24
ENTRY_SIZE = 80
assert ENTRY.size == ENTRY_SIZE and ENTRY_HEAD.size == ENTRY_HEAD_SIZE

FLAG_DELAY = 1
FLAG_TTL = 2  # the payload says after how long the message expires
FLAG_FORCED = 4  # an administrator decided the transaction


def is_forced(entry: bytes) -> bool:
    """Whether an administrator decided the transaction of an entry. Until 0.1 a forced rollback had bit 0 instead."""
    return bool(entry[1] & FLAG_FORCED or (entry[0] == EntryKind.ROLLBACK and entry[1] & FLAG_DELAY))


# Content of a RELEASE record: due time and payload position of the last message released.
RELEASED = struct.Struct("<QQ")

ENTRY_FIELDS = [
    ("kind", "<u1"),
    ("flags", "<u1"),
    ("queue", "<u2"),
    ("topic", "<u4"),
    ("time_us", "<u8"),
    ("offset", "<u8"),
    ("position", "<u8"),
    ("size", "<u4"),
    ("message_no", "<u2"),
    ("producer_group", "<u2"),
    ("deliver_us", "<u8"),
    ("id_high", ">u8"),
    ("id_low", ">u8"),
    ("tag_hash", "<u4"),
    ("payload_crc", "<u4"),
    ("key_hash", "<u8"),
]
"""numpy dtype of an entry. The id is two big-endian numbers, so that it sorts as its bytes do."""

crc32c: Callable[[bytes | bytearray | memoryview], int] = google_crc32c.value


def segment_header(base: int, created_us: int) -> bytes:
    head = SEGMENT_HEADER.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, base, created_us, 0)
    return head[:32] + crc32c(head[:32]).to_bytes(4, "little") + head[36:]


def read_segment_header(data: bytes) -> tuple[int, int]:
    """(base position, created). Raises ValueError naming what is wrong."""
    if len(data) < SEGMENT_HEADER_SIZE:
        raise ValueError("the file is shorter than a segment header")
    magic, version, _, base, created, crc = SEGMENT_HEADER.unpack_from(data)
    if magic != SEGMENT_MAGIC:
        raise ValueError("not a segment of this log (wrong magic)")
    if version > FORMAT_VERSION:
        raise ValueError(f"written by a newer version (format {version}, this one reads {FORMAT_VERSION})")
    if crc != crc32c(data[:32]):
        raise ValueError("the segment header is damaged (checksum)")
    return base, created


def frame(body: bytes, records: int, base: int, durable: int, time_us: int) -> bytes:
    """A whole frame around its body."""
    checked = _FRAME_CHECKED.pack(len(body), records, base, durable, time_us)
    crc = google_crc32c.extend(crc32c(checked), body)
    return FRAME_HEADER.pack(FRAME_MAGIC, len(body), crc, records, base, durable, time_us) + body


def frame_is_sound(header: tuple[bytes, int, int, int, int, int, int], body: bytes | memoryview) -> bool:
    """Whether an unpacked header's CRC fits it and the body."""
    _, length, crc, records, base, durable, time_us = header
    checked = _FRAME_CHECKED.pack(length, records, base, durable, time_us)
    return length == len(body) and crc == google_crc32c.extend(crc32c(checked), bytes(body))
