"""The bytes of the log's files and frames, described in format.md. Records are in records.py, entries in entry.py.

All integers are little-endian. A position is a byte address in the log as a whole; a segment's file is named by
the position of its first byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

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
_FRAME_CHECKED = struct.Struct("<IIQQQ")  # what the CRC covers of the header: all but magic and CRC

crc32c: Callable[[bytes | bytearray | memoryview], int] = google_crc32c.value


class FrameHeader(NamedTuple):
    """The fields of a frame's header."""

    magic: bytes
    length: int
    crc: int
    records: int
    base: int
    durable: int
    time_us: int

    @classmethod
    def of(cls, data: bytes | memoryview) -> FrameHeader:
        """The header that `data` begins with."""
        return cls._make(FRAME_HEADER.unpack_from(data))


def segment_header(base: int, created_us: int) -> bytes:
    head = SEGMENT_HEADER.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, base, created_us, 0)
    return head[:32] + crc32c(head[:32]).to_bytes(4, "little") + head[36:]


def read_segment_header(data: bytes) -> tuple[int, int]:
    """(base position, created). Raises ValueError with the reason if the header is invalid."""
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
    """Whether an unpacked header's CRC matches the header and the body."""
    _, length, crc, records, base, durable, time_us = header
    checked = _FRAME_CHECKED.pack(length, records, base, durable, time_us)
    return length == len(body) and crc == google_crc32c.extend(crc32c(checked), bytes(body))
