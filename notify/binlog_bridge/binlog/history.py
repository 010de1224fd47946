"""Checks that a source still has the history that a bridge's position belongs to.

GTIDs alone do not show that: after RESET MASTER the same numbers are used again, and once they have passed the
bridge's, the source would skip everything up to there. A position therefore contains the file in which it was read,
when that file began, and the server that wrote it. The first file of each connection is compared with these. Another
server (after a failover) has other files: there only the GTIDs are compared, by the server itself.
"""

from __future__ import annotations

import struct

from notify.binlog_bridge.binlog.position import GtidSet, MariaDbSet, MySqlSet, Position, shown
from notify.binlog_bridge.errors import Purged
from notify.protocol.limits import digits


def _number(file: str) -> int:
    """A binlog's number; 0 for a name without one."""
    return digits(file.rpartition(".")[2]) or 0


class History:
    """Compares a position with the files that a source sends."""

    def __init__(self, position: Position | None) -> None:
        """`position` None, or without a file and server: nothing is compared."""
        self.purged = MySqlSet()
        """A MySQL's gtid_purged. No file of the binlog lists transactions that came from a dump or a clone."""
        self._position = position if position is not None and position.file and position.server else None

    def file_begins(self, name: str, created: int, server: int) -> None:
        """Check a file that begins; `created`: when its server began to write it. Raises Purged."""
        position = self._position
        if position is None:
            return
        if server != position.server:
            self._position = None
        elif name == position.file:
            self._position = None
            if position.created and created != position.created:
                raise _foreign(f"the source has replaced {name} since this bridge read it")
        elif _number(name) < _number(position.file):
            raise _foreign(f"the source has the bridge's GTIDs in {name}, and this bridge read them in {position.file}")

    def state_before_file(self, gtids: GtidSet) -> None:
        """Check the set of all transactions before the file that began last. Raises Purged."""
        position, self._position = self._position, None
        # The source continues with a later file only if nothing in the bridge's own file is left to read.
        if position is None:
            return
        before = gtids.union(self.purged) if isinstance(gtids, MySqlSet) else gtids
        if not before.has(position.gtids):
            raise _foreign(
                f"the source's file begins after {shown(gtids)}, but this bridge's position is {shown(position.gtids)}"
            )


def _foreign(why: str) -> Purged:
    return Purged(
        f"the source has another history than this bridge's position, although its GTIDs go as far ({why}): was there "
        "a RESET MASTER, or was it restored from a backup? Nothing was skipped: start with --backfill, which sends the "
        "missing messages from the tables, and then continues"
    )


def gtid_list(body: bytes) -> MariaDbSet:
    """Decode the body of MariaDB's GTID_LIST event."""
    count = int.from_bytes(body[:4], "little") & 0x0FFFFFFF
    gtids = MariaDbSet()
    for n in range(count):
        gtids.add(*struct.unpack_from("<IIQ", body, 4 + 16 * n))
    return gtids
