"""Checks that a source still has the history that a bridge's position belongs to, and all that follows.

GTIDs alone do not show that: after RESET MASTER the same numbers are used again, and once they have passed the
bridge's, the source would skip everything up to there. A position therefore contains the file in which it was read,
when that file began, and the server that wrote it. The first file of each connection is compared with these. Another
server (after a failover) has other files: there only the GTIDs are compared, by the server itself.

A MySQL sends all transactions that a position does not name, and looks for gaps only among its own transactions. For
a position from another server, or after a failover that lost some, it sends its whole binlog, or skips missing ones.

A MariaDB writes replicated transactions to its own binlog only with log_slave_updates, which is OFF by default. And a
MariaDB whose binlog has nothing in a replication domain regards the domain as another server's: it accepts every
position there, as does a replica that was made from a backup. In both cases a bridge would wait without an error, and
then skip everything that the server replicated from its primary.
"""

from __future__ import annotations

import struct
from typing import Any

import pymysql

from notify.binlog_bridge.binlog.position import GtidSet, MariaDbSet, MySqlSet, Position, shown
from notify.binlog_bridge.errors import Purged
from notify.protocol.limits import digits


def file_number(file: str) -> int:
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
        elif file_number(name) < file_number(position.file):
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


_REMEDY = (
    "Nothing was skipped: set log_slave_updates = ON on every server that a bridge may continue with, before it "
    "becomes a replica; start with --backfill, which sends the missing messages from the tables, and then continues"
)
_UNLOGGED = "did not write them to its own binlog (log_slave_updates is OFF)"


def check_continues(connection: Any, position: Position | None) -> bool:
    """Whether the server writes all its changes to its binlog, including those that it replicates.

    Raises Purged if a transaction after the position is not in its binlog, or will not be.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@server_id, @@log_slave_updates, @@gtid_binlog_state, @@gtid_slave_pos")
        own_id, logs_all, state, slave_pos = cursor.fetchone()
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Slaves_running'")
        running = cursor.fetchone()
    moved = MariaDbSet.parse(position.gtids if position else "")
    logged, replicated = MariaDbSet.parse(str(state or "")), MariaDbSet.parse(str(slave_pos or ""))
    if not int(logs_all):
        _check_unlogged(int(own_id), replicated, moved, is_replica=bool(running and int(running[1])))
    for domain, gtid in moved.domains.items():
        if domain not in logged.domains and replicated.domains.get(domain) != gtid:
            raise Purged(
                f"the source's binlog has nothing of replication domain {domain}, and this bridge stands at {moved}: "
                f"the source was made from a backup, or its binlog was reset. {_REMEDY}"
            )
    return bool(int(logs_all))


def _check_unlogged(own_id: int, replicated: MariaDbSet, moved: MariaDbSet, *, is_replica: bool) -> None:
    """Check a server that does not log replicated transactions. Raises Purged."""
    if is_replica:
        raise Purged(f"the source is a replica that does not log what it takes (log_slave_updates is OFF). {_REMEDY}")
    for domain, (server, number) in replicated.domains.items():
        if server != own_id and number > moved.domains.get(domain, (0, 0))[1]:
            raise Purged(
                f"the source took transactions up to {domain}-{server}-{number} from another server, and {_UNLOGGED}; "
                f"this bridge stands at {moved}. {_REMEDY}. If the source has written nothing since then, write to it "
                "first; if those are of an older history, SET GLOBAL gtid_slave_pos = ''"
            )


def check_executed(connection: Any, position: Position) -> None:
    """Raises Purged if a MySQL does not have all transactions up to a position."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT GTID_SUBTRACT(%s, @@GLOBAL.gtid_executed)", (position.gtids,))
        lacking = str(cursor.fetchone()[0]).replace("\n", "")
    if lacking:
        raise Purged(
            f"the source does not have {shown(lacking)}, which this bridge has already moved: it is a replica that is "
            "behind, or a new primary without the last transactions of the old one, or has another history. "
            "Nothing was skipped. If this is the right server, start with --backfill, which sends the missing messages "
            "from the tables, and then continues; an audit names messages whose transactions were lost (GHOST)"
        )


_ANONYMOUS = "Anonymous_Gtid"
_NO_SUCH_FILE = 1220
_MOST_BEFORE = 3
"""The events of a file up to the first one of a transaction: two at its beginning."""


def check_unnamed(connection: Any, position: Position) -> None:
    """Raises Purged if a MySQL has written transactions without GTIDs right after a position in its own binlog, while
    gtid_mode was not ON. It begins with the first file that has GTIDs that a reader lacks, and so skips them.

    If another transaction follows the position, the source sends all from there, and the reader itself meets the
    others.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@server_id")
        file, offset = position.file, position.offset
        if not file or cursor.fetchone()[0] != position.server:
            return
        while True:
            try:
                cursor.execute(f"SHOW BINLOG EVENTS IN %s FROM {max(offset, 4)} LIMIT {_MOST_BEFORE}", (file,))
            except pymysql.Error as error:
                if error.args[0] == _NO_SUCH_FILE:
                    return
                raise
            kinds = [str(row[2]) for row in cursor.fetchall()]
            if _ANONYMOUS in kinds:
                raise Purged(
                    f"the source wrote transactions without GTIDs in {file}, while gtid_mode was not ON, and skips "
                    "them for this bridge: start with --backfill, which sends the missing messages from the tables, "
                    "and then continues"
                )
            if any(kind.startswith("Gtid") for kind in kinds):
                return
            name, _, number = file.rpartition(".")
            file, offset = f"{name}.{file_number(file) + 1:0{len(number)}}", 0


def check_gap(moved: MariaDbSet, domain: int, number: int) -> None:
    """Check a transaction of a server that does not log replicated ones.

    Raises Purged if its number does not follow the last one: the server was a replica in between.
    """
    before = moved.domains.get(domain)
    if before is not None and number != before[1] + 1:
        raise Purged(
            f"the source went from {domain}-{before[0]}-{before[1]} to number {number}: it took transactions from "
            f"another server in between, and {_UNLOGGED}. {_REMEDY}"
        )
