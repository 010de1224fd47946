"""The records in the log's frames, described in format.md.

A record is a header, index entries, and data whose layout depends on its type. The structs below are its parts; META
records are in meta.py.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from notify.storage.log.entry import ENTRY_SIZE

# Record header: length with this header, type, flags (always 0), number of index entries that follow it.
RECORD_HEADER = struct.Struct("<IBBH")
RECORD_HEADER_SIZE = 8
assert RECORD_HEADER.size == RECORD_HEADER_SIZE

# Data of a RELEASE record: due time and payload position of the last message released.
RELEASED = struct.Struct("<QQ")

encode = msgspec.msgpack.Encoder().encode


class RecordType(enum.IntEnum):
    HALF = 1
    OUTCOME = 2
    MESSAGE = 3  # stored as committed at once
    RELEASE = 4  # a delayed message came due
    PROGRESS = 5
    DEAD_LETTER = 6
    META = 7  # topics, subscriptions and the like
    CHECK = 8
    CARRY = 9  # a live payload of an expiring segment, written again


class Record(NamedTuple):
    """A record in a frame's body."""

    kind: int
    entries: memoryview
    data: memoryview


def records(body: memoryview) -> Iterator[Record]:
    """The records of a frame."""
    at = 0
    while at < len(body):
        length, kind, _, count = RECORD_HEADER.unpack_from(body, at)
        data_at = at + RECORD_HEADER_SIZE + count * ENTRY_SIZE
        yield Record(kind, body[at + RECORD_HEADER_SIZE : data_at], body[data_at : at + length])
        at += length


class Sender(msgspec.Struct, array_like=True, gc=False):
    """The sender of the halves in a HALF or MESSAGE record, before the payloads, with its length in two bytes."""

    group: str
    source: str
    instance: str
    check_after_us: int


_decode_sender = msgspec.msgpack.Decoder(Sender).decode


def sender_bytes(data: memoryview, at: int = 0) -> bytes:
    """The encoded sender at the beginning of a HALF or MESSAGE record's data."""
    size = int.from_bytes(data[at : at + 2], "little")
    return bytes(data[at + 2 : at + 2 + size])


def sender_head(sender: Sender) -> bytes:
    """The beginning of a HALF or MESSAGE record's data; the payloads follow."""
    encoded = encode(sender)
    return len(encoded).to_bytes(2, "little") + encoded


def sender_of(encoded: bytes) -> Sender:
    """Raises msgspec.DecodeError."""
    return _decode_sender(encoded)


ATTEMPTS = "attempts"


class Progressed(msgspec.Struct, array_like=True, gc=False):
    """A group settled offsets of a queue, or failed attempts at some. DEAD_LETTER records have a list of these."""

    what: int | str
    """A SettleKind, or ATTEMPTS."""
    group: str
    topic: int
    queue: int
    runs: Sequence[tuple[int, ...]]
    """(first offset, count). For ATTEMPTS: (offset, attempts so far, when it is due again, deaths, interruptions, since
    when its key is held or how the hold ended), without zeros at its end. Earlier versions wrote and read the first
    three, or five."""


class Held(Progressed, array_like=True, gc=False):
    """ATTEMPTS after which keys are held. Progress is decoded as this; only holds are written with it."""

    reasons: Sequence[str] = ()
    """The reason of each run that has a time since when its key is held."""


class CheckAnswered(msgspec.Struct, array_like=True, gc=False):
    """A CHECK record: an answer that did not decide the transaction."""

    id: bytes
    attempts: int
    parked: bool
    next_check_us: int


_decode_progressed = msgspec.msgpack.Decoder(Held).decode
_decode_dead_letters = msgspec.msgpack.Decoder(list[Held]).decode
_decode_check = msgspec.msgpack.Decoder(CheckAnswered).decode


def progressed(kind: int, data: memoryview) -> Sequence[Held]:
    """The progress in a record; empty for records of other types."""
    if kind == RecordType.PROGRESS:
        return [_decode_progressed(data)]
    if kind == RecordType.DEAD_LETTER:
        size = int.from_bytes(data[:4], "little")
        return _decode_dead_letters(data[4 : 4 + size])
    return []


def dead_letter_head(settled: list[Progressed]) -> bytes:
    """The beginning of a DEAD_LETTER record's data; the payloads follow."""
    encoded = encode(settled)
    return len(encoded).to_bytes(4, "little") + encoded


def check_answered(data: memoryview) -> CheckAnswered:
    return _decode_check(data)
