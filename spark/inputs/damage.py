"""Reads damaged frames: it finds and corrects a single wrong byte, and reports any other damage.

CRC32C is linear: the difference between the stored and the computed checksum depends only on which bits are wrong and
on their distance from the end. Computing the checksum backwards, byte by byte, finds the one place where a change of a
single byte makes that difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from notify.protocol import ids
from notify.spark.inputs.facts import Facts, Hole
from notify.storage.log.entry import ENTRY_SIZE, ENTRY_TYPE
from notify.storage.log.format import FRAME_HEADER, FRAME_HEADER_SIZE, FRAME_MAGIC, crc32c, frame_is_sound
from notify.storage.log.records import RECORD_HEADER, RECORD_HEADER_SIZE

_CHECKED_FROM = 12
"""The checksum covers the length (bytes 4 to 8) and everything from here on."""
_SEARCHED_BYTES = 16 << 20
MOST_BROKEN = 1000
"""The most damages of one segment that are listed; further ones are only counted."""


@dataclass
class Broken:
    """Damaged bytes [position, end) of the log. `body`: the frame's body as it was written, if it is known."""

    position: int
    end: int
    detail: str
    body: bytes | None = None
    time_us: int = 0
    message: tuple[str, int] | None = None
    """Transaction id and number of the message whose payload is damaged."""

    def plain(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "end": self.end,
            "detail": self.detail,
            "id": self.message[0] if self.message else None,
            "no": self.message[1] if self.message else None,
            "read": self.body is not None,
            "time_us": self.time_us,
        }


class Damages:
    """The damages of one segment, in lists of bounded length."""

    def __init__(self) -> None:
        self._broken: list[dict[str, Any]] = []
        self._left = 0
        self._holes: list[Hole] = []

    def add(self, broken: Broken) -> None:
        if len(self._broken) < MOST_BROKEN:
            self._broken.append(broken.plain())
        else:
            self._left += 1

    def add_hole(self, hole: Hole) -> None:
        """Add a hole. If the list is full, the last hole grows up to the end of the new one.

        An audit concludes nothing from a message that is missing in a hole.
        """
        if len(self._holes) < MOST_BROKEN:
            self._holes.append(hole)
        else:
            self._holes[-1] = replace(self._holes[-1], end=hole.end, to_us=hole.to_us)

    def tell(self, facts: Facts) -> None:
        """Store the damages in the segment's facts."""
        facts.broken, facts.broken_left, facts.holes = tuple(self._broken), self._left, tuple(self._holes)


def examine(data: bytes, position: int) -> Iterator[Broken]:
    """Examine damaged bytes of the log, up to the next sound frame."""
    header = data[:FRAME_HEADER_SIZE]
    end = position + len(data)
    if len(header) < FRAME_HEADER_SIZE:
        yield Broken(position, end, f"{len(data)} bytes are not a frame")
        return
    magic, length, crc, records, base, durable, time_us = FRAME_HEADER.unpack(header)
    body = data[FRAME_HEADER_SIZE:]
    following = FRAME_HEADER_SIZE + length
    if magic == FRAME_MAGIC and base == position and data[following : following + 4] == FRAME_MAGIC:
        yield from examine(data[:following], position)
        yield from examine(data[following:], position + following)
        return
    # The caller knows the position and the length of the frame; the header may be wrong.
    expected = (FRAME_MAGIC, len(body), crc, records, position, durable, time_us)
    if frame_is_sound(expected, body):
        wrong = [
            name
            for name, is_right in (("magic", magic == FRAME_MAGIC), ("length", length == len(body)))
            if not is_right
        ]
        yield Broken(position, end, f"the frame's {' and '.join(wrong) or 'position'} is wrong", body, time_us)
        return
    fixed = _one_byte(FRAME_HEADER.pack(*expected), body)
    if fixed is None:
        yield Broken(position, end, f"more than one of {len(data)} bytes is wrong", None, time_us)
        return
    at, was, header, body = fixed
    place = position + at
    now = data[at]
    message = _message_at(body, position + FRAME_HEADER_SIZE, place)
    detail = f"byte {place} is {now:#04x}; it was written as {was:#04x}"
    yield Broken(position, end, detail, body, FRAME_HEADER.unpack(header)[6], message)


def _one_byte(header: bytes, body: bytes) -> tuple[int, int, bytes, bytes] | None:
    """(place, right value, header, body) if one byte is wrong; None if more bytes are, or the frame is too long."""
    frame = bytearray(header + body)
    stated = int.from_bytes(frame[8:12], "little")
    difference = stated ^ crc32c(bytes(frame[4:8]) + bytes(frame[_CHECKED_FROM:]))
    place = None
    for byte in range(4):
        if difference == difference & 0xFF << 8 * byte:
            place, change = 8 + byte, difference >> 8 * byte  # the checksum itself
    if place is None:
        if len(frame) > _SEARCHED_BYTES:
            return None
        table, by_top, single = _tables()
        for at in range(len(frame) - 1, _CHECKED_FROM - 1, -1):
            byte_change = single.get(difference)
            if byte_change is not None:
                place, change = at, byte_change
                break
            index = by_top[difference >> 24]
            difference = ((difference ^ table[index]) << 8 | index) & 0xFFFFFFFF
        if place is None:
            return None
    frame[place] ^= change
    fixed_header, fixed_body = bytes(frame[:FRAME_HEADER_SIZE]), bytes(frame[FRAME_HEADER_SIZE:])
    if not frame_is_sound(FRAME_HEADER.unpack(fixed_header), fixed_body):
        return None
    return place, frame[place], fixed_header, fixed_body


@cache
def _tables() -> tuple[list[int], list[int], dict[int, int]]:
    """The table of CRC32C, its index by highest byte, and the change of the last byte that makes each difference."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    by_top = [0] * 256
    for byte, value in enumerate(table):
        by_top[value >> 24] = byte
    return table, by_top, {value: byte for byte, value in enumerate(table) if byte}


def _message_at(body: bytes, body_at: int, place: int) -> tuple[str, int] | None:
    """(transaction id, message number) of the message whose payload covers `place`; None if no payload covers it."""
    at = 0
    while at < len(body):
        length, _, _, count = RECORD_HEADER.unpack_from(body, at)
        if body_at + at <= place < body_at + at + length:
            entries = np.frombuffer(body, ENTRY_TYPE, count, at + RECORD_HEADER_SIZE)
            if place < body_at + at + RECORD_HEADER_SIZE + count * ENTRY_SIZE:
                return None
            for entry in entries:
                start = int(entry["position"])
                if start <= place < start + int(entry["size"]):
                    high, low = int(entry["id_high"]), int(entry["id_low"])
                    return ids.to_text(high.to_bytes(8) + low.to_bytes(8)), int(entry["message_no"])
            return None
        at += length
    return None
