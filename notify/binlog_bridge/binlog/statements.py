"""A statement in a binlog: its session's database, its text, and whether it may have written a message without rows."""

from __future__ import annotations

import re

from notify.binlog_bridge.errors import Unreadable
from notify.binlog_bridge.scope import Scope

_NAME = re.compile(rb"(?:SAVEPOINT|ROLLBACK(?: WORK)? TO(?: SAVEPOINT)?)\s+(.+?)\s*\Z", re.IGNORECASE | re.DOTALL)


def statement_in(packet: bytes, checksum: int, further: int = 0) -> tuple[bytes, bytes]:
    """The session's database and the text in a statement's event.

    `checksum`: the size of the event's checksum in bytes; `further`: how many more bytes its fixed part has than that
    of a QUERY event.
    """
    names, variables = packet[28], int.from_bytes(packet[31:33], "little")
    begin = 33 + further + variables
    return packet[begin : begin + names], packet[begin + names + 1 : len(packet) - checksum]


def savepoint_name(statement: bytes) -> bytes:
    """The name in SAVEPOINT or ROLLBACK TO, without quotes and in lower case, as the source compares names."""
    match = _NAME.match(statement)
    if match is None:
        raise Unreadable(f"a statement about a savepoint cannot be read: {statement[:80]!r}")
    name = match[1]
    if name[:1] in (b"`", b'"'):
        name = name[1:-1].replace(name[:1] * 2, name[:1])
    return name.decode("utf-8", "replace").lower().encode()


def check_no_message(scope: Scope, database: bytes, text: bytes) -> None:
    """Raises Unreadable if a statement of a session in `database` may have written to a table of ours."""
    if b"half_message" in text.lower() and scope.is_named_in(database, text):
        raise Unreadable(
            f"a session wrote to a table of ours in STATEMENT format ({text[:80].decode('utf-8', 'replace')} …): "
            "set binlog_format = ROW, then start this bridge with --backfill"
        )
