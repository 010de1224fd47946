"""An index entry: 80 bytes with the place of a message's payload and the message's fate. Described in format.md.

The log handles entries as joined bytes: it writes, copies and searches them in bulk. Only this file knows their
layout. `Entry.of` unpacks one entry; the functions below read one field each;
`ENTRY_TYPE` is numpy's view of many.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ENTRY_SIZE = 80
ENTRY_HEAD_SIZE = 24

# An entry has two parts. The head changes between a half and its place in a queue: kind, flags, queue, topic, time (of
# the record, microseconds), queue offset.
ENTRY_HEAD = struct.Struct("<BBHIQQ")
# The half fixes the tail: payload position, payload size, message number, producer group, deliver at (microseconds;
# with FLAG_DELAY a delay that counts from the commit), transaction id, tag hash, payload CRC32C, key hash.
ENTRY_TAIL = struct.Struct("<QIHHQ16sIIQ")
ENTRY = struct.Struct("<BBHIQQQIHHQ16sIIQ")
assert ENTRY.size == ENTRY_SIZE and ENTRY_HEAD.size == ENTRY_HEAD_SIZE

ENTRY_TYPE = np.dtype(
    [
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
)
"""numpy dtype of an entry. The id is two big-endian numbers, so that it sorts as its bytes do."""
assert ENTRY_TYPE.itemsize == ENTRY_SIZE

# The fields of a half's entry that its commit needs: flags, queue, topic, deliver at.
HALF = struct.Struct("<xBHI32xQ")

# Offsets of single fields, for searches that do not unpack entries.
TOPIC_AT = 4
TIME_AT = 8
OFFSET_AT = 16
NUMBER_AT = 36
GROUP_AT = 38
ID_AT = 48
KEY_HASH_AT = 72


class EntryKind(enum.IntEnum):
    HALF = 1
    QUEUE = 2
    ROLLBACK = 3
    DELAYED = 4  # committed, not due yet
    CARRY = 5
    GONE = 6  # was in a queue and expired; only in sealed indexes, to find its id
    WITHDRAWN = 7  # was delayed, and withdrawn in time by its sender
    WITHDRAWAL = 8  # a withdrawal that is not put into a queue; its offset is its Fate


FLAG_DELAY = 1
FLAG_TTL = 2  # the payload has the message's time to live
FLAG_FORCED = 4  # an administrator decided the transaction
FLAG_WITHDRAWS = 8  # the message withdraws another one
FLAG_DEDUPE = 16  # the message has a dedupe key


class Fixed(NamedTuple):
    """The tail of an entry, which its half fixes."""

    position: int
    size: int
    message_no: int
    producer_group: int
    deliver_us: int
    transaction_id: bytes
    tag_hash: int
    payload_crc: int
    key_hash: int

    @classmethod
    def of(cls, tail: bytes) -> Fixed:
        return cls._make(ENTRY_TAIL.unpack(tail))


class Entry(NamedTuple):
    """The fields of an entry."""

    kind: int
    flags: int
    queue: int
    topic: int
    time_us: int
    offset: int
    position: int
    size: int
    message_no: int
    producer_group: int
    deliver_us: int
    transaction_id: bytes
    tag_hash: int
    payload_crc: int
    key_hash: int

    @classmethod
    def of(cls, entry: bytes | memoryview) -> Entry:
        return cls._make(ENTRY.unpack(entry))

    @property
    def is_forced(self) -> bool:
        """Whether an administrator decided the transaction. Until 0.1 a forced rollback had bit 0 instead."""
        return bool(self.flags & FLAG_FORCED or (self.kind == EntryKind.ROLLBACK and self.flags & FLAG_DELAY))

    @property
    def due_us(self) -> int:
        """When a DELAYED entry is due. A delay counts from the commit."""
        return self.time_us + self.deliver_us if self.flags & FLAG_DELAY else self.deliver_us


place_of: Callable[[Sequence[Any]], tuple[int, int]] = itemgetter(
    Entry._fields.index("position"), Entry._fields.index("size")
)
"""Payload position and size of an unpacked entry, for loops that make no `Entry`."""


# --- one field of an entry ----------------------------------------------------------------------------------------


def transaction_id_of(entry: bytes) -> bytes:
    return entry[ID_AT : ID_AT + 16]


def topic_of(entry: bytes) -> int:
    """The number of the topic."""
    return int.from_bytes(entry[TOPIC_AT : TOPIC_AT + 4], "little")


def message_key_of(entry: bytes) -> bytes:
    """The transaction id and the message number, as a dictionary key."""
    return entry[ID_AT : ID_AT + 16] + entry[NUMBER_AT : NUMBER_AT + 2]


def message_key(transaction_id: bytes, number: int) -> bytes:
    """The `message_key` of an id and a number."""
    return transaction_id + number.to_bytes(2, "little")


def tail_of(entry: bytes) -> bytes:
    """The part that the half fixes."""
    return entry[ENTRY_HEAD_SIZE:]


def group_number_of(entry: bytes) -> int:
    """The number of the producer group; 0: not recorded."""
    return int.from_bytes(entry[GROUP_AT : GROUP_AT + 2], "little")


def key_hash_of_tail(tail: bytes) -> int:
    """The key's hash in the tail of an entry; 0: no key."""
    return int.from_bytes(tail[-8:], "little")


# --- many entries, joined -----------------------------------------------------------------------------------------


def transaction_ids_of(entries: memoryview) -> list[bytes]:
    """The transaction id of each entry."""
    return [bytes(entries[at : at + 16]) for at in range(ID_AT, len(entries), ENTRY_SIZE)]


def each_of(entries: bytes | bytearray | memoryview) -> Iterator[bytes]:
    """The entries one by one."""
    for at in range(0, len(entries), ENTRY_SIZE):
        yield bytes(entries[at : at + ENTRY_SIZE])


def last_offset(entries: bytes) -> int:
    """The offset of the last of these entries."""
    at = len(entries) - ENTRY_SIZE + OFFSET_AT
    return int.from_bytes(entries[at : at + 8], "little")


def table_of(entries: bytes | bytearray | memoryview) -> NDArray[Any]:
    """The entries as a table of ENTRY_TYPE, over the same memory."""
    return np.frombuffer(entries, ENTRY_TYPE)


def due_times(table: NDArray[Any]) -> NDArray[np.uint64]:
    """When delayed entries are due. A delay counts from the entry's time."""
    counted = np.where(table["flags"] & FLAG_DELAY, table["time_us"], np.uint64(0))
    due: NDArray[np.uint64] = counted + table["deliver_us"]
    return due


def is_delayed(kinds: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of these kinds are ordered by due time: delayed messages and their withdrawals."""
    delayed: NDArray[np.bool_] = (kinds == EntryKind.DELAYED) | (kinds == EntryKind.WITHDRAWN)
    return delayed


def queue_keys(table: NDArray[Any]) -> NDArray[np.uint64]:
    """The key of each entry's queue: topic number and queue number in one integer."""
    keys: NDArray[np.uint64] = (table["topic"].astype(np.uint64) << np.uint64(16)) | table["queue"]
    return keys
