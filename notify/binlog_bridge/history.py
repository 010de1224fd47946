"""Whether a source still has the history that a bridge's position belongs to.

GTIDs alone do not say so: after RESET MASTER the same numbers come again, and once they have passed the bridge's, the
source would skip everything up to there. A position therefore names the file in which it was read, when that file
began, and the server that wrote it; the first file of each connection is compared with them. Another server (after a
failover) has files of its own: there only its GTIDs are compared, by the server itself.
"""

from __future__ import annotations

import struct

from notify.binlog_bridge.position import GtidSet, MariaDbSet, MySqlSet, Position
from notify.errors import StorageFailed


class Purged(StorageFailed):
    """The source no longer has, or never had, what follows the position: nothing may be skipped silently."""

    code = "purged_position"


def _number(file: str) -> int:
    """A binlog's number; 0 for a name without one."""
    digits = file.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


class History:
    """Compares a position with the files that a source sends."""

    def __init__(self, position: Position | None) -> None:
        """`position` None, or one that does not say whose file it is in: nothing is compared."""
        self._position = position if position is not None and position.file and position.server else None

    def file_begins(self, name: str, created: int, server: int) -> None:
        """A file of the source begins, which a server began to write at `created`. Raises Purged."""
        wanted = self._position
        if wanted is None:
            return
        if server != wanted.server:
            self._position = None
        elif name == wanted.file:
            self._position = None
            if wanted.created and created != wanted.created:
                raise _foreign(f"the source began {name} anew since this bridge read it")
        elif _number(name) < _number(wanted.file):
            raise _foreign(f"the source has the bridge's GTIDs in {name}, and this bridge read them in {wanted.file}")

    def state_before_file(self, gtids: GtidSet) -> None:
        """All transactions before the file that began last. Raises Purged."""
        wanted, self._position = self._position, None
        # The source goes on from a later file only if nothing of the bridge's own file is left to read.
        if wanted is not None and not gtids.has(wanted.gtids):
            raise _foreign(f"the source's file begins behind {gtids}, and this bridge's position is {wanted.gtids}")


def _foreign(why: str) -> Purged:
    return Purged(
        f"the source has another history than this bridge's position, although its GTIDs go as far ({why}): was there "
        "a RESET MASTER, or was it restored from a backup? Nothing was skipped: start with --backfill, which takes "
        "what is missing from the table, and goes on from now"
    )


def gtid_list(body: bytes) -> MariaDbSet:
    """The body of MariaDB's GTID_LIST event."""
    count = int.from_bytes(body[:4], "little") & 0x0FFFFFFF
    gtids = MariaDbSet()
    for n in range(count):
        gtids.add(*struct.unpack_from("<IIQ", body, 4 + 16 * n))
    return gtids


def previous_gtids(body: bytes) -> MySqlSet | None:
    """The body of MySQL's PREVIOUS_GTIDS event; None for the form with tags, which no position can be compared with."""
    count = int.from_bytes(body[:8], "little")
    if count >> 56:
        return None
    gtids = MySqlSet()
    at = 8
    for _ in range(count):
        uuid = server_uuid(body[at : at + 16])
        intervals = int.from_bytes(body[at + 16 : at + 24], "little")
        at += 24
        for _ in range(intervals):
            first, end = struct.unpack_from("<qq", body, at)
            gtids.insert(uuid, first, end - 1)
            at += 16
    return gtids


def server_uuid(raw: bytes) -> str:
    """A server's UUID as MySQL writes it in a GTID."""
    h = raw.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
