"""How current a database is that follows another one (a standby, a replica, or a subscriber).

Commits of the primary that the copy does not have yet, or leaves out, are not findings.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from notify.storage.sql.replication_filters import left_out, skipped_errors

_SECOND_US = 1_000_000
_LAGS = ("Seconds_Behind_Source", "Seconds_Behind_Master")
_ACCESS_DENIED = (1227, 1044, 1045)
_NO_RIGHT = "42501"


@dataclass(frozen=True)
class Replica:
    """`until_us`: the copy has all earlier commits, in microseconds since 1970; 0: not known, and `why`."""

    until_us: int
    why: str = ""


def replica_of(
    connection: sa.Connection, kind: str, now_us: int, schema: str, tables: Collection[str]
) -> Replica | None:
    """How current a database is; None if it follows no other.

    `now_us`: the time of the database's clock. `tables`: those that an audit reads in the schema; they may be missing.
    """
    if kind == "postgresql":
        return _of_postgresql(connection, schema, tables)
    return _of_mysql(connection, now_us, schema, tables) if kind == "mysql" else None


# With each message the receiver records the position of the primary at the time of sending. A standby that has replayed
# up to that position has all earlier commits, even if the primary has been idle since. Only some roles may read this.
_STANDBY = """
SELECT CAST(date_part('epoch', pg_last_xact_replay_timestamp()) * 1000000 AS bigint) AS replayed_us,
    (SELECT CAST(date_part('epoch', last_msg_send_time) * 1000000 AS bigint) FROM pg_stat_wal_receiver
     WHERE status = 'streaming' AND pg_last_wal_replay_lsn() >= latest_end_lsn) AS received_us
"""
_SUBSCRIBED = sa.text("""
SELECT s.subname, c.relname FROM pg_subscription s JOIN pg_subscription_rel r ON r.srsubid = s.oid
JOIN pg_class c ON c.oid = r.srrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE s.subenabled AND n.nspname = :schema AND c.relname IN :tables ORDER BY 1, 2 LIMIT 1
""").bindparams(sa.bindparam("tables", expanding=True))


def unseen_from(copies_us: Sequence[int], read_us: int, skew_us: int) -> int:
    """The instant from which on a copy may lack rows whose messages were in queues at `read_us`; 0: no copy lacks any.

    `copies_us`: how current the copies are. `skew_us`: the error of their clocks.
    """
    until_us = min(copies_us, default=read_us + skew_us) - skew_us
    return 0 if until_us >= read_us else max(1, until_us)


def _of_postgresql(connection: sa.Connection, schema: str, tables: Collection[str]) -> Replica | None:
    if not connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar():
        return _of_subscriber(connection, schema, tables)
    row = connection.exec_driver_sql(_STANDBY).one()
    until_us = max(row.replayed_us or 0, row.received_us or 0)
    return Replica(until_us, "" if until_us else "it has replayed no transaction since it started")


def _of_subscriber(connection: sa.Connection, schema: str, tables: Collection[str]) -> Replica | None:
    try:
        found = connection.execute(_SUBSCRIBED, {"schema": schema, "tables": sorted(tables)}).first()
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _NO_RIGHT:
            raise
        return None  # before version 12, only a superuser may ask
    if found is None:
        return None
    name, table = found
    return Replica(
        0, f"the subscription {name} fills its table {table} by logical replication, which lags and may leave out rows"
    )


def _of_mysql(connection: sa.Connection, now_us: int, schema: str, tables: Collection[str]) -> Replica | None:
    is_mariadb = getattr(connection.dialect, "is_mariadb", False)
    try:
        query = "SHOW ALL SLAVES STATUS" if is_mariadb else "SHOW REPLICA STATUS"
        channels = [dict(row) for row in connection.exec_driver_sql(query).mappings()]
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "args", (0,))[0] not in _ACCESS_DENIED:
            raise
        if not _is_read_only(connection):
            return None
        right = "REPLICA MONITOR" if is_mariadb else "REPLICATION CLIENT"
        return Replica(0, f"it is read-only, and its replication may not be seen (grant {right})")
    lags = [next((row[name] for name in _LAGS if name in row), None) for row in channels]
    if not lags:
        return None
    if why := left_out(channels, schema, tables):
        return Replica(0, why)
    if errors := skipped_errors(connection):
        return Replica(0, f"its replication leaves out what fails ({errors})")
    if any(lag is None for lag in lags):
        return Replica(0, "its replication does not run")
    # A lag is in whole seconds. It is also 0 if nothing arrives any more: a connection that was cut silently counts as
    # open until its timeout.
    behind = max(int(lag) for lag in lags if lag is not None) + 1 + _silence(connection, channels)
    return Replica(now_us - behind * _SECOND_US)


def _silence(connection: sa.Connection, channels: Sequence[Mapping[str, Any]]) -> int:
    """The longest time in seconds for which a running replica may have heard nothing from its primary."""
    query = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('slave_net_timeout', 'replica_net_timeout')"
    timeouts = [int(row[1]) for row in connection.exec_driver_sql(query)]
    # A connection keeps the timeout with which it began. Heartbeats come at half of it, unless their period was set.
    heartbeats = [float(row.get("Slave_heartbeat_period") or 0) for row in channels]
    return max([*timeouts, *(math.ceil(2 * period) for period in heartbeats)])


def _is_read_only(connection: sa.Connection) -> bool:
    value: Any = connection.exec_driver_sql("SELECT @@global.read_only").scalar()
    return str(value).upper() not in ("0", "OFF")
