"""Checks a bridge's source: its variables, grants and tables. Each finding names the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.binlog_bridge.position import MariaDbSet, Position
from notify.binlog_bridge.tables import COLUMNS
from notify.errors import InvalidRequest
from notify.outbox import LOCAL, SERVER
from notify.wire import microseconds

_TAG = re.compile(r":\s*[A-Za-z_]")
_READ_AS_UTF8 = ("ascii", "utf8", "utf8mb3", "utf8mb4")
"""Character sets of MySQL and MariaDB whose bytes are UTF-8."""
_WIDE = ("ucs2", "utf16", "utf16le", "utf32")
"""Character sets whose bytes differ from UTF-8 even for ASCII."""
_ANY_LETTERS = ("key", "headers")
"""The text columns that may have characters other than ASCII."""
_NO_SUCH_STATEMENT, _MAY_NOT = 1064, 1227
_FILTERS = ("binlog_do_db", "binlog_ignore_db")
_NEEDED_GRANTS = ("REPLICATION SLAVE", "REPLICATION REPLICA", "ALL PRIVILEGES")


@dataclass(slots=True, frozen=True)
class Finding:
    """A fault of a source. `stops`: a bridge would leave messages out, and refuses to start."""

    what: str
    remedy: str
    stops: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def _is(*allowed: str) -> Callable[[str], bool]:
    return lambda value: value.upper() in allowed


_VARIABLES: tuple[tuple[str, Callable[[str], bool], str, str, bool], ...] = (
    ("log_bin", _is("ON", "1"), "there is no binlog", "start the server with --log-bin", True),
    (
        "binlog_format",
        _is("ROW"),
        "binlog_format is {}: statements cannot be read as rows",
        "SET GLOBAL binlog_format = 'ROW', and in the configuration; sessions keep the old one until they reconnect",
        True,
    ),
    (
        "binlog_row_image",
        _is("FULL", "FULL_NODUP"),
        "binlog_row_image is {}: rows lack columns",
        "SET GLOBAL binlog_row_image = 'FULL', and in the configuration",
        True,
    ),
    (
        "binlog_row_metadata",
        _is("FULL"),
        "binlog_row_metadata is {}: columns have no names",
        "SET GLOBAL binlog_row_metadata = 'FULL', and in the configuration",
        True,
    ),
    (
        "gtid_mode",
        _is("ON"),
        "gtid_mode is {}: positions would not survive a failover",
        "SET GLOBAL gtid_mode = 'ON' step by step (OFF_PERMISSIVE, ON_PERMISSIVE, ON)",
        True,
    ),
    (
        "gtid_strict_mode",
        _is("ON", "1"),
        "gtid_strict_mode is {}: a failover could mix up the order of GTIDs",
        "SET GLOBAL gtid_strict_mode = ON",
        False,
    ),
    (
        "sync_binlog",
        _is("1"),
        "sync_binlog is {}: after a power failure the binlog may lack what was acknowledged",
        "SET GLOBAL sync_binlog = 1",
        False,
    ),
    (
        "innodb_flush_log_at_trx_commit",
        _is("1"),
        "innodb_flush_log_at_trx_commit is {}: acknowledged changes may vanish after their message went out",
        "SET GLOBAL innodb_flush_log_at_trx_commit = 1",
        False,
    ),
)


_OTHERS = ("server_id", "log_slave_updates", "wsrep_on")


def variables(connection: Connection) -> dict[str, str]:
    """The global variables that matter to a bridge; those that the server does not have are left out."""
    names = ",".join(f"'{name}'" for name in (*[row[0] for row in _VARIABLES], *_OTHERS))
    rows = connection.exec_driver_sql(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    return {str(name).lower(): str(value) for name, value in rows}


def is_mariadb(connection: Connection) -> bool:
    return "mariadb" in str(connection.exec_driver_sql("SELECT VERSION()").scalar()).lower()


def is_read_only(connection: Connection) -> bool:
    """Whether the source accepts writes only from its primary.

    A user with all rights may still write to it. Its binlog then has a GTID that conflicts with the primary's next one,
    and replication ends.
    """
    return str(connection.exec_driver_sql("SELECT @@read_only").scalar()).upper() not in ("0", "OFF")


def database(connection: Connection) -> str:
    """The name of the connection's database as in the source's binlog, which may differ from the URL in case."""
    return str(connection.exec_driver_sql("SELECT DATABASE()").scalar() or "")


def findings(connection: Connection, server_id: int) -> list[Finding]:
    """All findings about a source, those that stop a bridge first."""
    all_findings: list[Finding] = []
    values = variables(connection)
    for name, is_right, what, remedy, stops in _VARIABLES:
        value = values.get(name)
        if value is not None and not is_right(value):
            all_findings.append(Finding(what.format(value or "empty"), remedy, stops))
    if values.get("server_id") == str(server_id):
        all_findings.append(
            Finding(f"server id {server_id} is the source's own", "give this bridge another --server-id")
        )
    user = str(connection.exec_driver_sql("SELECT CURRENT_USER()").scalar())
    grants = " ".join(str(row[0]) for row in connection.exec_driver_sql("SHOW GRANTS")).upper()
    if not any(grant in grants for grant in _NEEDED_GRANTS):
        name, _, host = user.partition("@")
        all_findings.append(
            Finding(
                f"{user} may not read the binlog",
                f"GRANT REPLICATION SLAVE ON *.* TO '{name}'@'{host}'",
            )
        )
    if not is_mariadb(connection) and has_tags(str(connection.exec_driver_sql("SELECT @@gtid_executed").scalar())):
        all_findings.append(
            Finding(
                "gtid_executed has GTIDs with tags, which no position of a bridge can hold",
                "let services write with gtid_next = AUTOMATIC, without a tag, to a server that never had such GTIDs",
            )
        )
    if is_mariadb(connection):
        all_findings += _replica_findings(connection, values)
    all_findings += _filter_findings(connection)
    all_findings += _table_findings(connection)
    return sorted(all_findings, key=lambda f: not f.stops)


def _replica_findings(connection: Connection, values: dict[str, str]) -> list[Finding]:
    """Findings if changes that the source replicates may be missing from its binlog."""
    if values.get("log_slave_updates", "ON") in ("ON", "1"):
        return []
    if values.get("wsrep_on") in ("ON", "1"):
        return [
            Finding(
                "log_slave_updates is OFF: the binlog lacks what other nodes of the Galera cluster write",
                "log_slave_updates = ON in the configuration of each node, and restart it",
            )
        ]
    if not connection.exec_driver_sql("SELECT @@gtid_slave_pos").scalar():
        return []
    return [
        Finding(
            "log_slave_updates is OFF: the binlog lacks what this server took as a replica",
            "log_slave_updates = ON in the configuration of each server that a bridge may continue with; restart it",
            stops=False,  # the bridge checks itself whether it needs such changes
        )
    ]


def has_tags(gtids: str) -> bool:
    """Whether a GTID set of MySQL 8.4 (uuid:1-5:tag:1-3) names tags."""
    return _TAG.search(gtids) is not None


def _filter_findings(connection: Connection) -> list[Finding]:
    """Findings if the source leaves this database out of its binlog."""
    try:
        status = _binlog_status(connection)
    except sa.exc.OperationalError as error:
        if error.orig is None or error.orig.args[0] != _MAY_NOT:
            raise
        return [
            Finding(
                "this user may not see whether binlog_do_db or binlog_ignore_db leaves the database out of the binlog",
                "GRANT BINLOG MONITOR (MySQL: REPLICATION CLIENT) ON *.* to it",
                stops=False,
            )
        ]
    name = database(connection)
    only, never = [[part.strip() for part in status.get(key, "").split(",") if part.strip()] for key in _FILTERS]
    if name in only or (not only and name not in never):
        return []
    why = _FILTERS[0] if only else _FILTERS[1]
    return [
        Finding(
            f"{why} leaves database {name} out of the binlog",
            f"remove {name} from binlog_ignore_db, or add it to binlog_do_db, in the server's configuration, restart "
            "it, and start this bridge with --backfill",
        )
    ]


def _binlog_status(connection: Connection) -> dict[str, str]:
    """The state of the binlog by column, in lower case. Raises OperationalError if the user may not see it."""
    try:
        rows = connection.exec_driver_sql("SHOW MASTER STATUS")
    except sa.exc.ProgrammingError as error:  # MySQL from version 8.4 on does not have this statement
        if error.orig is None or error.orig.args[0] != _NO_SUCH_STATEMENT:
            raise
        rows = connection.exec_driver_sql("SHOW BINARY LOG STATUS")
    row = rows.mappings().first()
    return {str(key).lower(): str(value) for key, value in row.items()} if row is not None else {}


def _table_findings(connection: Connection) -> list[Finding]:
    where = f"table_schema = DATABASE() AND table_name IN ('{LOCAL.table.name}', '{SERVER.table.name}')"
    rows = connection.exec_driver_sql(
        f"SELECT table_name, engine, table_type FROM information_schema.tables WHERE {where}"
    ).all()
    if not rows:
        return [
            Finding(
                f"there is neither {LOCAL.table.name} nor {SERVER.table.name} in this database",
                "run create_tables in the service (outbox), or `notify storage upgrade` (server)",
            )
        ]
    engines = [
        Finding(f"{name} is a table of {engine}", f"ALTER TABLE {name} ENGINE = InnoDB")
        for name, engine, _ in rows
        if str(engine).lower() != "innodb"
    ]
    versioned = [
        Finding(
            f"{name} keeps the history of its rows (SYSTEM VERSIONING): each change of a row inserts the old one again",
            f"ALTER TABLE {name} DROP SYSTEM VERSIONING",
        )
        for name, _, kind in rows
        if str(kind).upper() == "SYSTEM VERSIONED"
    ]
    rare = connection.exec_driver_sql(
        f"SELECT table_name, column_name FROM information_schema.columns WHERE {where} AND column_type LIKE '%%5.3 */'"
    )
    times = [
        Finding(
            f"{table}.{column} is written as MariaDB 5.3 did (mysql56_temporal_format was OFF)",
            f"SET GLOBAL mysql56_temporal_format = ON, ALTER TABLE {table} FORCE; start this bridge with --backfill",
        )
        for table, column in rare
    ]
    filled = connection.exec_driver_sql(
        f"SELECT table_name, column_name FROM information_schema.columns WHERE {where} AND column_name IN {COLUMNS} "
        "AND is_nullable = 'YES' AND column_default IS NOT NULL AND column_default <> 'NULL'"
    )
    defaults = [
        Finding(
            f"{table}.{column} has a DEFAULT, which a bridge does not see where a session logs less than whole rows",
            f"ALTER TABLE {table} ALTER COLUMN `{column}` DROP DEFAULT",
            stops=False,
        )
        for table, column in filled
    ]
    sets = connection.exec_driver_sql(
        f"SELECT table_name, column_name, character_set_name FROM information_schema.columns WHERE {where} "
        f"AND (column_name IN {_ANY_LETTERS} AND character_set_name NOT IN {_READ_AS_UTF8} "
        f"OR column_name IN {COLUMNS} AND character_set_name IN {_WIDE})"
    )
    texts = [
        Finding(
            f"{table}.{column} has the character set {name}: its texts would be read as UTF-8",
            f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4, then start this bridge with --backfill",
        )
        for table, column, name in sets
    ]
    return engines + versioned + times + texts + defaults


def begin_snapshot(connection: Connection) -> Position:
    """Begin a transaction that sees the tables as they are now; the binlog position of that snapshot.

    MariaDB knows the exact position of a snapshot. MySQL makes a transaction visible before it adds its GTID to
    gtid_executed. So the snapshot has all transactions before a position that was read before it; transactions that
    commit between the two are both in the snapshot and after the position. Raises InvalidRequest if the source does
    not tell the position.
    """
    now: Any = connection.exec_driver_sql("SELECT UTC_TIMESTAMP(6)").scalar()
    now_us = microseconds(now.replace(tzinfo=UTC))
    mariadb = is_mariadb(connection)
    executed = "" if mariadb else current_position(connection).gtids
    connection.rollback()
    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
    if not mariadb:
        return Position(executed, newest_us=now_us)
    rows = connection.exec_driver_sql("SHOW STATUS LIKE 'binlog_snapshot_%%'")
    status = {str(name).lower(): str(value) for name, value in rows}
    file, offset = status.get("binlog_snapshot_file", ""), int(status.get("binlog_snapshot_position") or 0)
    gtids = connection.execute(sa.select(sa.func.binlog_gtid_pos(file, offset))).scalar()
    if gtids is None:
        raise InvalidRequest(f"the source does not say which GTIDs are before {file}:{offset}, where its snapshot is")
    server = int(connection.exec_driver_sql("SELECT @@server_id").scalar() or 0)
    return Position(str(gtids), file, offset, server=server, newest_us=now_us)


def current_position(connection: Connection) -> Position:
    """The position after all transactions that are committed now."""
    if is_mariadb(connection):
        row = connection.exec_driver_sql("SELECT @@gtid_binlog_pos, @@log_slave_updates, @@gtid_slave_pos").one()
        logged, logs_all, replicated = MariaDbSet.parse(str(row[0] or "")), int(row[1]), str(row[2] or "")
        if not logs_all:  # replicated transactions are in its tables, but not in its binlog
            for domain, (server, number) in MariaDbSet.parse(replicated).domains.items():
                if number > logged.domains.get(domain, (0, 0))[1]:
                    logged.add(domain, server, number)
        return Position(str(logged))
    return Position(str(connection.exec_driver_sql("SELECT @@gtid_executed").scalar() or "").replace("\n", ""))


def clock_offset_us(connection: Connection, now_us: Callable[[], int]) -> int:
    """Microseconds to add to this machine's clock to get the source's time."""
    before = now_us()
    at: Any = connection.exec_driver_sql("SELECT UTC_TIMESTAMP(6)").scalar()
    source_us = microseconds(at.replace(tzinfo=UTC))
    return source_us - (before + now_us()) // 2
