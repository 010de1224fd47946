"""A bridge's replication slot: its name, its state, what it keeps of the log, and a snapshot of the tables."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.binlog_bridge.errors import Unfit
from notify.binlog_bridge.log import LogSnapshot
from notify.binlog_bridge.postgresql.position import Position, lsn_of
from notify.binlog_bridge.postgresql.replication import Replication
from notify.protocol.wire import microseconds
from notify.runtime.databases import database_now
from notify.runtime.urls import without_secrets

log = logging.getLogger("notify.binlog_bridge")

PREFIX = "notify_"
SERVER_SUFFIX = "_server"
"""The suffix of the publication of a server's table."""
_NAME_BYTES = 63
MAKE_SECONDS = 60.0
"""How long a slot may take to be made: PostgreSQL waits for the end of every transaction that writes. It has the bound,
too: it would notice only after that wait that nobody wants the slot any more, and keep the log until then."""
ANSWER_SECONDS = 5.0
"""How much later the bridge itself gives up."""
_WRITERS = "transactions that write: see pg_stat_activity and pg_prepared_xacts"
_FAILOVER_SINCE = 17_00_00


def slot_name(source: str) -> str:
    """The name of a source's slot and publication. A name that PostgreSQL does not take as it is gets a checksum."""
    plain = re.sub(r"[^a-z0-9_]", "_", source.lower())
    if plain != source.replace("-", "_") or len(PREFIX + plain) > _NAME_BYTES - len(SERVER_SUFFIX):
        plain = f"{plain[:40]}_{zlib.crc32(source.encode()):08x}"
    return PREFIX + plain


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot, and the publications that say which tables' changes it gives out."""

    name: str
    publications: Sequence[str]


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of a slot, as PostgreSQL tells it. Sizes are in bytes."""

    name: str
    is_active: bool
    is_lost: bool
    retained: int
    """How much of the log is kept for it."""
    left: int | None
    """How much more may be written before it is lost; None: there is no bound."""
    age: int
    """How many transactions old the oldest is whose catalogue rows are kept for it."""
    plugin: str = ""
    why: str = ""
    """Why it was lost, where the server tells."""


# The row as JSON, since later versions have more columns.
_STATES = (
    "SELECT to_jsonb(s), pg_wal_lsn_diff({end}, s.restart_lsn)::bigint, age(s.catalog_xmin) "
    "FROM pg_replication_slots s WHERE s.slot_type = 'logical' AND s.database = current_database() AND {which}"
)
_DROP = sa.text("SELECT pg_drop_replication_slot(:name)")
_END = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"


def states(connection: Connection, name: str | None = None) -> list[SlotState]:
    """The logical slots of this database; `name`: only this one."""
    which = "s.slot_name = :name" if name else "true"
    rows = connection.execute(sa.text(_STATES.format(end=_END, which=which)), {"name": name} if name else {})
    return [_state(*row) for row in rows]


def _state(row: dict[str, Any], retained: int | None, age: int | None) -> SlotState:
    return SlotState(
        str(row["slot_name"]),
        bool(row["active"]),
        is_lost(row),
        max(0, int(retained or 0)),
        int(row["safe_wal_size"]) if row.get("safe_wal_size") is not None else None,
        int(age or 0),
        str(row.get("plugin") or ""),
        str(row.get("invalidation_reason") or row.get("wal_status") or ""),
    )


def is_lost(row: Mapping[str, Any]) -> bool:
    """Whether PostgreSQL has given up a slot. `row`: that of pg_replication_slots; versions differ in their columns."""
    return row.get("wal_status") == "lost" or bool(row.get("invalidation_reason") or row.get("conflicting"))


def make(engine: Engine, name: str) -> None:
    """Make the slot if it is missing, and again if it is lost. Raises Unfit, Unavailable."""
    with engine.connect() as connection:
        state = next(iter(states(connection, name)), None)
        version = int(str(connection.exec_driver_sql("SHOW server_version_num").scalar()))
        if state is not None and not state.is_lost:
            return
        if state is not None:
            connection.execute(_DROP, {"name": name})
            connection.commit()
            log.warning("slot %s was lost (%s), and is recreated", name, state.why)
    options = "(SNAPSHOT 'nothing', FAILOVER true)" if version >= _FAILOVER_SINCE else "NOEXPORT_SNAPSHOT"
    with Replication(engine.url, lock_seconds=MAKE_SECONDS) as replication:
        replication.command(
            f'CREATE_REPLICATION_SLOT "{name}" LOGICAL pgoutput {options}',
            seconds=MAKE_SECONDS + ANSWER_SECONDS,
            late=f"slot {name} waits for the end of {_WRITERS}",
        )
    log.info("%s has the slot %s for this bridge now", without_secrets(str(engine.url)), name)


class Kept(NamedTuple):
    """The slot and publications that a database keeps for a bridge."""

    slot: str
    found: bool
    """Whether there is such a slot."""
    retained_bytes: int
    """How much of the log is kept for it."""
    publications: list[str]
    left: str = ""
    """The statements that this role may not execute."""


def kept_for(connection: Connection, name: str) -> Kept:
    """The objects of the bridge whose slot has this name. Raises Unfit if a bridge reads it."""
    state = next(iter(states(connection, name)), None)
    if state is not None and state.is_active:
        raise Unfit(f"slot {name} is being read: stop its bridge first")
    wanted = sa.text("SELECT pubname FROM pg_publication WHERE pubname IN (:name, :server) ORDER BY 1")
    rows = connection.execute(wanted, {"name": name, "server": name + SERVER_SUFFIX})
    return Kept(name, state is not None, state.retained if state else 0, [str(row[0]) for row in rows])


def drop(connection: Connection, kept: Kept) -> Kept:
    """Drop a slot and its publications, and return what there was. The slot goes first: a publication keeps nothing."""
    if kept.found:
        connection.execute(_DROP, {"name": kept.slot})
        connection.commit()
    left = []
    for publication in kept.publications:
        statement = f'DROP PUBLICATION IF EXISTS "{publication}"'
        try:
            connection.exec_driver_sql(statement)
            connection.commit()
        except sa.exc.ProgrammingError as error:
            connection.rollback()
            left.append(f"{statement} ({str(error.orig).strip().splitlines()[0]})")
    return kept._replace(left="; ".join(left))


def snapshot(engine: Engine, name: str, published: str = "", scope: str = "") -> LogSnapshot:
    """A transaction that sees exactly what committed before a place in the log. `name`: the bridge's slot, which has to
    be there already. `published`, `scope`: see Position.

    A temporary slot tells that place, and lends its snapshot. Raises Unavailable, Unfit.
    """
    with Replication(engine.url, lock_seconds=MAKE_SECONDS) as replication:
        system, timeline, started = replication.identity()
        made = replication.command(
            f'CREATE_REPLICATION_SLOT "{name}_fill" TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT',
            seconds=MAKE_SECONDS + ANSWER_SECONDS,
            late=f"the backfill waits for the end of {_WRITERS}",
        )
        _, consistent_point, exported, _ = made[0]
        connection = engine.connect().execution_options(isolation_level="REPEATABLE READ")
        try:
            connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{exported}'")
            # From PostgreSQL 17 on a role may bound its transactions; this one reads all tables.
            connection.exec_driver_sql(
                "SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout'"
            )
            now: Any = connection.execute(sa.select(database_now())).scalar()
        except BaseException:
            connection.close()
            raise
    at_us = microseconds(now.replace(tzinfo=UTC))
    position = Position(lsn_of(consistent_point), system, timeline, at_us, published, scope, started)
    return LogSnapshot(connection, position, position)


def current_position(connection: Connection) -> Position:
    """The end of the log. Transactions that committed without waiting for the disk may be after it."""
    return _position(connection, "pg_current_wal_flush_lsn()")


def end_of_log(connection: Connection) -> Position:
    """A place after every transaction that has committed by now, which a reader comes to even if nothing follows.

    It is a small transaction of its own: what lies before its commit is on the disk afterwards. The connection's
    transaction is committed.
    """
    connection.exec_driver_sql("SET LOCAL synchronous_commit = local")
    position = _position(connection, "pg_logical_emit_message(true, 'notify-end', '')")
    connection.commit()
    return position


def _position(connection: Connection, lsn: str) -> Position:
    # The name of a file of the log begins with the timeline. The control file has it only after a checkpoint.
    row = connection.exec_driver_sql(
        "SELECT l::text, system_identifier::text, substr(pg_walfile_name(l), 1, 8) "
        f"FROM pg_control_system(), (SELECT ({lsn}) AS l) AS place"
    ).one()
    return Position(lsn_of(row[0]), str(row[1]), int(str(row[2]), 16))
