"""Checks a bridge's source: its variables and tables. Each finding names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.binlog_bridge.binlog import rights
from notify.binlog_bridge.binlog.history import file_number
from notify.binlog_bridge.binlog.position import MariaDbSet, Position
from notify.binlog_bridge.errors import Unfit
from notify.binlog_bridge.rows import COLUMNS
from notify.movers.outbox import LOCAL, MOVES, SERVER
from notify.protocol.limits import digits
from notify.protocol.wire import microseconds
from notify.runtime.databases import has_table
from notify.runtime.guarantees import faults
from notify.storage.sql import checkup
from notify.storage.sql.checkup import Finding, is_mariadb, is_on
from notify.storage.sql.replication_filters import left_out, skipped_errors

_READ_AS_UTF8 = ("ascii", "utf8", "utf8mb3", "utf8mb4")
"""Character sets of MySQL and MariaDB whose bytes are UTF-8."""
_WIDE = ("ucs2", "utf16", "utf16le", "utf32")
"""Character sets whose bytes differ from UTF-8 even for ASCII."""
_ANY_LETTERS = ("key", "headers")
"""The text columns that may have characters other than ASCII."""
_NO_SUCH_STATEMENT = 1064
_FILTERS = ("binlog_do_db", "binlog_ignore_db")
KEPT_SECONDS = 86_400
"""A binlog that is deleted sooner than this gives an operator less than a day to start a bridge again."""


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
        "binlog_expire_logs_seconds",
        lambda value: float(value) == 0 or float(value) >= KEPT_SECONDS,
        "binlog_expire_logs_seconds is {}: a bridge that is stopped for longer has to start with --backfill",
        "SET GLOBAL binlog_expire_logs_seconds = 604800, and in the configuration",
        False,
    ),
    (
        "binlog_error_action",
        _is("ABORT_SERVER"),
        "binlog_error_action is {}: when its disk is full, the server continues without a binlog, and the bridge "
        "misses what it writes then",
        "SET GLOBAL binlog_error_action = 'ABORT_SERVER', and in the configuration",
        False,
    ),
    (
        "init_connect",
        lambda value: not any(word in value.lower() for word in ("sql_log_bin", "binlog_format", "binlog_row_")),
        "init_connect changes how sessions write the binlog ({}): the bridge may miss what they write",
        "SET GLOBAL init_connect to a text without it, and in the configuration; sessions keep it until they reconnect",
        False,
    ),
)


_LOGS_REPLICATED = ("log_replica_updates", "log_slave_updates")
"""The variable's name in MySQL since 8.0.26, and in MariaDB and older MySQL."""
_OTHERS = (
    *_LOGS_REPLICATED,
    "server_id",
    "wsrep_on",
    "wsrep_gtid_mode",
    "read_only",
    "replica_preserve_commit_order",
    "replica_parallel_workers",
)


def variables(connection: Connection) -> dict[str, str]:
    """The global variables that matter to a bridge; those that the server does not have are left out."""
    return checkup.variables(connection, (*[row[0] for row in _VARIABLES], *_OTHERS))


def database(connection: Connection) -> str:
    """The name of the connection's database as in the source's binlog, which may differ from the URL in case."""
    return str(connection.exec_driver_sql("SELECT DATABASE()").scalar() or "")


def findings(connection: Connection, server_id: int, schemas: Sequence[str] | None = None) -> list[Finding]:
    """All findings about a source, those that stop a bridge first. `schemas`: those with its tables; None: the
    connection's database."""
    where = schemas if schemas is not None else [""]
    all_findings: list[Finding] = []
    values = variables(connection)
    for name, is_right, what, remedy, stops in _VARIABLES:
        value = values.get(name)
        if value is not None and not is_right(value):
            all_findings.append(Finding(what.format(value or "empty"), remedy, stops))
    if "binlog_row_metadata" not in values:
        all_findings.append(
            Finding(
                "this server cannot name the columns of rows in its binlog (it has no binlog_row_metadata)",
                "upgrade it, at least to MySQL 8.0 or MariaDB 10.5, or run `notify relay`",
            )
        )
    if values.get("server_id") == str(server_id):
        all_findings.append(
            Finding(f"server id {server_id} is the source's own", "give this bridge another --server-id")
        )
    all_findings += rights.findings(connection, where)
    all_findings += checkup.findings(connection)
    all_findings += _replica_findings(connection, values)
    all_findings += _order_findings(connection, values)
    all_findings += unseen_replica(connection) if is_mariadb(connection) else []  # MySQL has one right for both
    names = schemas if schemas is not None else [database(connection)]
    all_findings += _filter_findings(connection, names)
    all_findings += _left_out_findings(connection, names)
    for schema in where:
        all_findings += _table_findings(connection, schema)
    return sorted(all_findings, key=lambda f: not f.stops)


def _replica_findings(connection: Connection, values: dict[str, str]) -> list[Finding]:
    """Findings if changes that the source replicates may be missing from its binlog, or have other GTIDs elsewhere."""
    name = next((name for name in _LOGS_REPLICATED if name in values), None)
    if name is None or is_on(values[name]):
        return _galera_findings(values)
    if is_on(values.get("wsrep_on")):
        return [
            Finding(
                f"{name} is OFF: the binlog lacks what other nodes of the Galera cluster write",
                f"{name} = ON in the configuration of each node, and restart it",
            )
        ]
    remedy = f"{name} = ON in the configuration of each server that a bridge may continue with; restart it"
    if not is_mariadb(connection):
        if is_replica(connection, values):
            return [Finding(f"{name} is OFF: the binlog lacks what this server takes as a replica", remedy)]
        what = f"{name} is OFF: the binlog will lack what this server takes as a replica"
        return [Finding(what, remedy, stops=False)]
    if not connection.exec_driver_sql("SELECT @@gtid_slave_pos").scalar():
        return []
    what = f"{name} is OFF: the binlog lacks what this server took as a replica"
    return [Finding(what, remedy, stops=False)]  # the bridge checks itself whether it needs such changes


def _galera_findings(values: dict[str, str]) -> list[Finding]:
    if not is_on(values.get("wsrep_on")) or is_on(values.get("wsrep_gtid_mode", "ON")):
        return []
    return [
        Finding(
            "wsrep_gtid_mode is OFF: each node of the Galera cluster gives a transaction a GTID of its own, and no "
            "other node can continue a bridge",
            "wsrep_gtid_mode = ON, one wsrep_gtid_domain_id and one server_id in the configuration of all nodes",
            stops=False,
        )
    ]


def _order_findings(connection: Connection, values: dict[str, str]) -> list[Finding]:
    """A finding if a replica of MySQL commits in another order than its primary did."""
    if is_on(values.get("replica_preserve_commit_order", "ON")) or int(values.get("replica_parallel_workers", 0)) < 2:
        return []
    if not is_replica(connection, values):
        return []
    return [
        Finding(
            "replica_preserve_commit_order is OFF on a replica with several workers: it commits in another order than "
            "its primary, and if it is promoted early, its transactions have gaps",
            "STOP REPLICA, SET PERSIST replica_preserve_commit_order = ON, START REPLICA",
            stops=False,
        )
    ]


def is_replica(connection: Connection, values: dict[str, str]) -> bool:
    """Whether a MySQL replicates from another server; if its user may not see that, whether it is read-only."""
    seen = replicates(connection)
    return is_on(values.get("read_only")) if seen is None else seen


def replicates(connection: Connection) -> bool | None:
    """Whether a MySQL or MariaDB replicates from another server; None if its user may not see that."""
    seen = _channels(connection)
    return None if seen is None else bool(seen)


def _channels(connection: Connection) -> list[dict[str, Any]] | None:
    """The state of each of the server's connections to a primary; None if its user may not see that."""
    every = "ALL " if is_mariadb(connection) else ""  # else MariaDB leaves out connections with a name
    many = "S" if is_mariadb(connection) else ""
    # The second before MySQL 8.0.22 and MariaDB 10.5.
    for statement in (f"SHOW {every}REPLICA{many} STATUS", f"SHOW {every}SLAVE{many} STATUS"):
        try:
            return [dict(row) for row in connection.exec_driver_sql(statement).mappings()]
        except sa.exc.DBAPIError as error:
            if rights.is_refusal(error):
                break
            if rights.code_of(error) != _NO_SUCH_STATEMENT:
                raise
    return None


def _left_out_findings(connection: Connection, names: Sequence[str]) -> list[Finding]:
    """Findings if a replica does not take all rows of the tables of these schemas: their GTIDs are passed all the same,
    and nobody tells a reader of its binlog."""
    channels = _channels(connection)
    if not channels:
        return []
    found = []
    for name in names:
        tables = [outbox.table.name for outbox in (LOCAL, SERVER) if has_table(connection, outbox.table.name, name)]
        if why := left_out(channels, name, tables):
            remedy = "name another candidate; or remove the filter, and make this replica again from its primary"
            found.append(Finding(f"this is a replica, and {why}", remedy))
    if errors := skipped_errors(connection):
        found.append(
            Finding(
                f"this is a replica, and its replication leaves out what fails ({errors})",
                "remove the setting from its configuration, and restart it",
                stops=False,
            )
        )
    return found


def unseen_replica(connection: Connection) -> list[Finding]:
    """A finding if this user may not see whether the server is a replica."""
    if replicates(connection) is not None:
        return []
    right = "REPLICA MONITOR" if is_mariadb(connection) else "REPLICATION CLIENT"
    return [
        Finding(
            "this user may not see whether the server is a replica, and so what producers in mode auto left behind "
            "stays there",
            f"GRANT {right} ON *.* TO {rights.account_of(connection)}",
            stops=False,
        )
    ]


def _filter_findings(connection: Connection, names: Sequence[str]) -> list[Finding]:
    """Findings if the source leaves one of these databases out of its binlog."""
    try:
        status = _binlog_status(connection)
    except sa.exc.OperationalError as error:
        if not rights.is_refusal(error):
            raise
        right = "BINLOG MONITOR" if is_mariadb(connection) else "REPLICATION CLIENT"
        return [
            Finding(
                "this user may not see whether binlog_do_db or binlog_ignore_db leaves the database out of the binlog",
                f"GRANT {right} ON *.* TO {rights.account_of(connection)}",
                stops=False,
            )
        ]
    only, never = [[part.strip() for part in status.get(key, "").split(",") if part.strip()] for key in _FILTERS]
    left_out = [name for name in names if name not in only and (only or name in never)]
    why = _FILTERS[0] if only else _FILTERS[1]
    return [
        Finding(
            f"{why} leaves database {name} out of the binlog",
            f"remove {name} from binlog_ignore_db, or add it to binlog_do_db, in the server's configuration, restart "
            "it, and start this bridge with --backfill",
        )
        for name in left_out
    ]


def _binlog_status(connection: Connection) -> dict[str, str]:
    """The state of the binlog by column, in lower case. Raises OperationalError if the user may not see it."""
    try:
        rows = connection.exec_driver_sql("SHOW MASTER STATUS")
    except sa.exc.ProgrammingError as error:  # MySQL from version 8.4 on does not have this statement
        if rights.code_of(error) != _NO_SUCH_STATEMENT:
            raise
        rows = connection.exec_driver_sql("SHOW BINARY LOG STATUS")
    row = rows.mappings().first()
    return {str(key).lower(): str(value) for key, value in row.items()} if row is not None else {}


def end_of_file(connection: Connection) -> tuple[int, int] | None:
    """The number of the file that the source writes, and how far; None if this user may not see that."""
    try:
        status = _binlog_status(connection)
    except sa.exc.OperationalError as error:
        if not rights.is_refusal(error):
            raise
        return None
    return file_number(status.get("file", "")), digits(status.get("position", "")) or 0


def _table_findings(connection: Connection, schema: str) -> list[Finding]:
    """Findings about the tables of a schema; "": the connection's database."""
    named = _literal(connection, schema) if schema else "DATABASE()"
    within = connection.dialect.identifier_preparer.quote_identifier(schema) + "." if schema else ""
    where = f"table_schema = {named} AND table_name IN ('{LOCAL.table.name}', '{SERVER.table.name}')"
    columns = "table_name, table_type"
    rows = _with(within, connection.exec_driver_sql(f"SELECT {columns} FROM information_schema.tables WHERE {where}"))
    if not rows:
        return [
            Finding(
                f"there is neither {LOCAL.table.name} nor {SERVER.table.name} in {schema or 'this database'}",
                "run create_tables in the service (outbox), or `notify storage upgrade` (server); if they are there, "
                f"GRANT SELECT, UPDATE ON them TO {rights.account_of(connection)}",
            )
        ]
    unsafe = [Finding(fault.what, fault.remedy) for fault in faults(connection, MOVES, schema)]
    versioned = [
        Finding(
            f"{name} keeps the history of its rows (SYSTEM VERSIONING): each change of a row inserts the old one again",
            f"ALTER TABLE {name} DROP SYSTEM VERSIONING",
        )
        for name, kind in rows
        if str(kind).upper() == "SYSTEM VERSIONED"
    ]
    return unsafe + versioned + _column_findings(connection, where, within)


def _literal(connection: Connection, text: str) -> str:
    """A text as a literal of a statement for the driver."""
    return str(sa.literal(text).compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))


def _with(within: str, rows: Iterable[Any]) -> list[tuple[str, ...]]:
    """Rows that begin with a table's name, with what stands before it."""
    return [(within + str(row[0]), *map(str, row[1:])) for row in rows]


def _column_findings(connection: Connection, where: str, within: str) -> list[Finding]:
    """Findings about the columns of the tables that the condition `where` names; `within`: what stands before a table's
    name."""
    rare = connection.exec_driver_sql(
        f"SELECT table_name, column_name FROM information_schema.columns WHERE {where} AND column_type LIKE '%%5.3 */'"
    )
    times = [
        Finding(
            f"{table}.{column} is written as MariaDB 5.3 did (mysql56_temporal_format was OFF)",
            f"SET GLOBAL mysql56_temporal_format = ON, ALTER TABLE {table} FORCE; start this bridge with --backfill",
        )
        for table, column in _with(within, rare)
    ]
    filled = connection.exec_driver_sql(
        f"SELECT table_name, column_name FROM information_schema.columns WHERE {where} AND column_name IN {COLUMNS} "
        "AND is_nullable = 'YES' AND column_default IS NOT NULL AND column_default <> 'NULL'"
    )
    defaults = [
        Finding(
            f"{table}.{column} has a DEFAULT, which a bridge does not see when a session logs less than whole rows",
            f"ALTER TABLE {table} ALTER COLUMN `{column}` DROP DEFAULT",
            stops=False,
        )
        for table, column in _with(within, filled)
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
        for table, column, name in _with(within, sets)
    ]
    return times + texts + defaults


def begin_snapshot(connection: Connection) -> Position:
    """Begin a transaction that sees the tables as they are now; the binlog position of that snapshot.

    MariaDB knows the exact position of a snapshot. MySQL makes a transaction visible before it adds its GTID to
    gtid_executed. So the snapshot has all transactions before a position that was read before it; transactions that
    commit between the two are both in the snapshot and after the position. Raises Unfit if the source does
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
        raise Unfit(f"the source does not say which GTIDs are before {file}:{offset}, where its snapshot is")
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


def contradicts(connection: Connection, position: Position) -> bool:
    """Whether a position names a place in this server's own binlog that has other GTIDs there. Only MariaDB tells."""
    if not is_mariadb(connection):
        return False
    if position.server != int(connection.exec_driver_sql("SELECT @@server_id").scalar() or 0):
        return False
    here = connection.execute(sa.select(sa.func.binlog_gtid_pos(position.file, position.offset))).scalar()
    return bool(here) and not MariaDbSet.parse(str(here)).has(position.gtids)
