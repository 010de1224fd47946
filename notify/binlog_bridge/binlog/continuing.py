"""Checks that a server has all transactions of a position, and its binlog all that follow, before it is read.

A MySQL sends all transactions that a position does not name, and looks for gaps only among its own transactions. For
a position from another server, or after a failover that lost some, it sends its whole binlog, or skips missing ones.

A MariaDB writes replicated transactions to its own binlog only with log_slave_updates, which is OFF by default. And a
MariaDB whose binlog has nothing in a replication domain regards the domain as another server's: it accepts every
position there, as does a replica that was made from a backup. In both cases a bridge would wait without an error, and
then skip everything that the server replicated from its primary.
"""

from __future__ import annotations

from typing import Any

from notify.binlog_bridge.binlog.position import MariaDbSet, Position, shown
from notify.binlog_bridge.errors import Purged

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


def check_gap(moved: MariaDbSet, domain: int, number: int) -> None:
    """Check a transaction of a server that does not log replicated ones.

    Raises Purged if its number does not follow the last one: the server was a replica in between.
    """
    before = moved.domains.get(domain)
    if before is not None and number != before[1] + 1:
        raise Purged(
            f"the source went on from {domain}-{before[0]}-{before[1]} with number {number}: it took transactions from "
            f"another server in between, and {_UNLOGGED}. {_REMEDY}"
        )
