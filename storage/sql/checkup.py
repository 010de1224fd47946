"""Checks a database of transactions or messages: whether acknowledged writes are durable, and others read them.

notify/binlog_bridge/binlog/source.py has the checks for a bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Connection


@dataclass(slots=True, frozen=True)
class Finding:
    """A fault of a database: its consequence, and what to do. `stops`: whether a bridge refuses to start."""

    what: str
    remedy: str
    stops: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(slots=True, frozen=True)
class Node:
    """A member of a cluster of several writers."""

    shown: str
    """Its URL without secrets."""
    cluster: str
    size: int
    """How many members its cluster has, according to this one."""
    takes_writes: bool


def is_mariadb(connection: Connection) -> bool:
    return "mariadb" in str(connection.exec_driver_sql("SELECT VERSION()").scalar()).lower()


def variables(connection: Connection, names: Sequence[str]) -> dict[str, str]:
    """Global variables of MySQL or MariaDB by name; unknown ones are left out."""
    listed = ",".join(f"'{name}'" for name in names)
    rows = connection.exec_driver_sql(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})")
    return {str(name).lower(): str(value) for name, value in rows}


def status(connection: Connection, names: Sequence[str]) -> dict[str, str]:
    """Status variables of MySQL or MariaDB by name; unknown ones are left out."""
    listed = ",".join(f"'{name}'" for name in names)
    rows = connection.exec_driver_sql(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({listed})")
    return {str(name).lower(): str(value) for name, value in rows}


def is_on(value: str | None) -> bool:
    return value is not None and value.upper() in ("ON", "1", "YES")


def findings(connection: Connection) -> list[Finding]:
    """Findings about a database for any use. Raises SQLAlchemyError."""
    if connection.dialect.name == "postgresql":
        if str(connection.exec_driver_sql("SHOW synchronous_commit").scalar()) != "off":
            return []
        # A bridge gets only what is on the disk already; a relay, a check and a producer do not.
        return [Finding(f"synchronous_commit is off: {_LOST}", "set it to on", stops=False)]
    if connection.dialect.name not in ("mysql", "mariadb"):
        return []
    values = variables(connection, [*(row[0] for row in _VARIABLES), *_OF_CLUSTERS])
    found = [
        Finding(what.format(value), remedy, stops=False)
        for name, is_right, what, remedy in _VARIABLES
        if (value := values.get(name)) is not None and not is_right(value)
    ]
    if status(connection, ["Innodb_redo_log_enabled"]).get("innodb_redo_log_enabled", "ON") == "OFF":
        found.append(
            Finding(
                "InnoDB writes no redo log: a crash loses the whole database",
                "ALTER INSTANCE ENABLE INNODB REDO_LOG",
                stops=False,
            )
        )
    if is_on(values.get("wsrep_on")):
        found += _galera_findings(values)
    if values.get("group_replication_group_name"):
        found += _group_findings(values)
    return found


PACKET_BYTES = 4 << 20
"""A statement with the largest message, whose bytes may be written as two, has less."""
_LOST = "a crash of the database may lose commits whose messages were sent"

_VARIABLES: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
    (
        "innodb_flush_log_at_trx_commit",
        lambda value: value == "1",
        f"innodb_flush_log_at_trx_commit is {{}}, not 1: {_LOST}",
        "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in the configuration",
    ),
    (
        "innodb_doublewrite",
        lambda value: value.upper() not in ("OFF", "0", "DETECT_ONLY"),
        "innodb_doublewrite is {}: a page that a loss of power tears cannot be repaired, and its rows are lost",
        "innodb_doublewrite = ON in the configuration, and restart the server",
    ),
    (
        "max_allowed_packet",
        lambda value: int(value) >= PACKET_BYTES,
        "max_allowed_packet is {} bytes: the largest messages are refused",
        f"SET GLOBAL max_allowed_packet = {4 * PACKET_BYTES}, and in the configuration",
    ),
    *(
        (
            name,
            lambda value: value.upper() != "READ-UNCOMMITTED",
            name + " is {}: services see, and act on, what others may still roll back",
            "SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ, and in the configuration",
        )
        for name in ("transaction_isolation", "tx_isolation")
    ),
)
_OF_CLUSTERS = (
    "wsrep_on",
    "wsrep_sync_wait",
    "group_replication_group_name",
    "group_replication_single_primary_mode",
    "group_replication_consistency",
)

# --- writing --------------------------------------------------------------------------------------------------


def standby_findings(connection: Connection) -> list[Finding]:
    """A finding if servers and services cannot write to a database. Raises SQLAlchemyError."""
    if connection.dialect.name == "postgresql":
        if not connection.exec_driver_sql("SELECT pg_catalog.pg_is_in_recovery()").scalar():
            return []
        return [Finding("this server is a standby and takes no writes", "name the primary, or promote this one")]
    if connection.dialect.name not in ("mysql", "mariadb"):
        return []
    values = variables(connection, ("read_only", "super_read_only"))
    on = [name for name in ("super_read_only", "read_only") if not _is_off(values.get(name, "OFF"))]
    if not on:
        return []
    return [
        Finding(
            f"{on[0]} is on: this server takes no writes",
            "name the primary; if this is to be the primary, end its replication, then SET GLOBAL "
            f"{', GLOBAL '.join(f'{name} = OFF' for name in on)}",
        )
    ]


def _is_off(value: str) -> bool:
    """Whether `read_only` is off. MariaDB has more values than ON: NO_LOCK and NO_LOCK_NO_ADMIN."""
    return value.upper() in ("OFF", "0")


# --- clusters of several writers --------------------------------------------------------------------------------

_SYNC_WAIT = 7
"""wsrep_sync_wait of SELECT (1), of UPDATE and DELETE (2), and of INSERT (4)."""


def _galera_findings(values: dict[str, str]) -> list[Finding]:
    """Findings about a node of Galera.

    Jepsen's report on MariaDB Galera Cluster 12.1.2 (March 2026) found stale reads and lost updates in clusters without
    any fault, and lost commits after crashes if the log is not flushed with each commit.
    """
    found = []
    if int(values.get("wsrep_sync_wait") or 0) & _SYNC_WAIT != _SYNC_WAIT:
        found.append(
            Finding(
                f"wsrep_sync_wait is {values.get('wsrep_sync_wait')}: after a change of node, servers and checks may "
                "miss what another node has acknowledged",
                f"SET GLOBAL wsrep_sync_wait = {_SYNC_WAIT}, and in the configuration of each node",
                stops=False,
            )
        )
    return found


def _group_findings(values: dict[str, str]) -> list[Finding]:
    """Findings about a member of MySQL's Group Replication."""
    found = []
    if not is_on(values.get("group_replication_single_primary_mode", "ON")):
        found.append(
            Finding(
                "every member of this replication group takes writes: a lock on one member does not hold on another, "
                "so servers and relays at several members get in each other's way",
                "SELECT group_replication_switch_to_single_primary_mode()",
                stops=False,
            )
        )
    if values.get("group_replication_consistency", "").upper() == "EVENTUAL":
        found.append(
            Finding(
                "group_replication_consistency is EVENTUAL: a new primary answers before it has applied what the old "
                "one acknowledged, and checks may get an older answer",
                "SET PERSIST group_replication_consistency = 'BEFORE_ON_PRIMARY_FAILOVER'",
                stops=False,
            )
        )
    return found


def node(connection: Connection, shown: str) -> Node | None:
    """The database as a node of Galera; None if it is not one. Raises SQLAlchemyError."""
    if connection.dialect.name not in ("mysql", "mariadb"):
        return None
    values = variables(connection, ("wsrep_on", "read_only"))
    if not is_on(values.get("wsrep_on")):
        return None
    state = status(connection, ("wsrep_cluster_state_uuid", "wsrep_cluster_size"))
    size = int(state.get("wsrep_cluster_size") or 1)
    return Node(shown, state.get("wsrep_cluster_state_uuid", ""), size, _is_off(values.get("read_only", "OFF")))


def writer_findings(nodes: Sequence[Node]) -> list[Finding]:
    """Findings if more than one node of a Galera cluster takes writes, or if that is not known."""
    found = []
    for cluster in dict.fromkeys(each.cluster for each in nodes):
        of_it = [each for each in nodes if each.cluster == cluster]
        writers = [each.shown for each in of_it if each.takes_writes]
        size = max(each.size for each in of_it)
        only_one = "SET GLOBAL read_only = ON on all nodes but the one that servers, services and relays write to"
        if len(writers) > 1:
            found.append(
                Finding(
                    f"{len(writers)} nodes of one Galera cluster take writes ({', '.join(writers)}): a lock on one "
                    "node does not hold on another, and updates on two nodes may be lost",
                    only_one,
                    stops=False,
                )
            )
        elif len(of_it) < size:
            found.append(
                Finding(
                    f"{len(of_it)} of the {size} nodes of a Galera cluster were checked: if another one takes "
                    "writes, updates on two nodes may be lost",
                    f"{only_one}, and name each node with its own --dsn",
                    stops=False,
                )
            )
    return found
