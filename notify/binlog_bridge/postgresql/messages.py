"""The messages of `pgoutput`, PostgreSQL's own output plugin, in version 1 of its protocol and with binary values.

https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from notify.binlog_bridge.errors import Unreadable

BEGIN, COMMIT, ORIGIN, RELATION, TYPE = b"BCORY"
INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"IUDTM"
HARMLESS = frozenset((ORIGIN, TYPE, DELETE, TRUNCATE))
"""Messages without a message of ours: a deleted or truncated row was a message when it was inserted."""
EPOCH_US = 946_684_800_000_000
"""PostgreSQL counts microseconds from 2000 on."""
_NEW, _OLD, _KEY = b"NOK"
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"


class Absent:
    """Stands for a value that a message does not have."""


UNCHANGED: Final = Absent()
"""The place of a long value that an update left as it was: the log has it only with REPLICA IDENTITY FULL."""
AS_TEXT: Final = Absent()
"""The place of a value of a type that has no binary form, which no column of ours has."""
Value = bytes | None | Absent


@dataclass(slots=True, frozen=True)
class Column:
    """A column of a relation. `type_oid`: the number of its type in pg_type."""

    name: str
    type_oid: int


@dataclass(slots=True, frozen=True)
class Relation:
    """A table, as it was when the rows that follow were written."""

    oid: int
    schema: str
    table: str
    columns: tuple[Column, ...]


def relation(data: bytes) -> Relation:
    """Decode RELATION."""
    (oid,) = struct.unpack_from(">I", data, 1)
    schema, at = _string(data, 5)
    table, at = _string(data, at)
    (count,) = struct.unpack_from(">H", data, at + 1)  # after the replica identity
    at += 3
    columns = []
    for _ in range(count):
        name, at = _string(data, at + 1)  # after the flags
        columns.append(Column(name, struct.unpack_from(">I", data, at)[0]))
        at += 8
    return Relation(oid, schema or "pg_catalog", table, tuple(columns))


def commit_us(data: bytes) -> int:
    """When the transaction that a BEGIN announces was committed, in microseconds since 1970."""
    return int(struct.unpack_from(">q", data, 9)[0]) + EPOCH_US


def commit_end(data: bytes) -> int:
    """Where in the log the commit ends that a COMMIT tells of."""
    return int(struct.unpack_from(">Q", data, 10)[0])


def relation_of(data: bytes) -> int:
    """The number of the relation that an INSERT or UPDATE is of."""
    return int.from_bytes(data[1:5])


def message(data: bytes) -> tuple[bool, str, bytes]:
    """A message of pg_logical_emit_message: whether it belongs to its transaction, its prefix and its content."""
    prefix, at = _string(data, 10)  # after the flags and the place in the log
    size = int.from_bytes(data[at : at + 4])
    return bool(data[1] & 1), prefix, data[at + 4 : at + 4 + size]


def inserted(data: bytes) -> list[Value]:
    """The values of an INSERT."""
    return _values(data, 6)[0]


def updated(data: bytes) -> tuple[list[Value] | None, list[Value]]:
    """The values before and after an UPDATE. Before: None unless the log has whole rows (REPLICA IDENTITY FULL)."""
    old: list[Value] | None = None
    at = 5
    if data[at] in (_OLD, _KEY):
        is_whole = data[at] == _OLD
        values, at = _values(data, at + 1)
        old = values if is_whole else None
    return old, _values(data, at + 1)[0]


def _values(data: bytes, at: int) -> tuple[list[Value], int]:
    """The values of a row, and the place after it."""
    count = data[at] << 8 | data[at + 1]
    at += 2
    values: list[Value] = []
    for _ in range(count):
        kind = data[at]
        if kind == _BINARY:
            begin = at + 5
            at = begin + int.from_bytes(data[at + 1 : begin])
            values.append(data[begin:at])
        elif kind == _NULL:
            values.append(None)
            at += 1
        elif kind == _UNCHANGED:
            values.append(UNCHANGED)
            at += 1
        elif kind == _TEXT:
            at += 5 + int.from_bytes(data[at + 1 : at + 5])
            values.append(AS_TEXT)
        else:
            raise Unreadable(f"the source sent a value in the form {chr(kind)!r}, which this version does not know")
    return values, at


def _string(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1
