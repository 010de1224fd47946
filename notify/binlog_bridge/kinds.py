"""The kinds of logs: which one a database has, and whose position a text is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.binlog.position import Position as BinlogPosition
from notify.binlog_bridge.log import DatabaseLog, Position
from notify.binlog_bridge.postgresql.position import Position as WalPosition
from notify.binlog_bridge.scope import Scope
from notify.binlog_bridge.source import id_of, is_read_only
from notify.errors import InvalidRequest
from notify.runtime.databases import within_schema

IS_A_REPLICA = (
    "this bridge reads a replica, and its primary would not learn what was sent. Run a process of the group, or "
    "`notify check`, on the primary"
)


def log_of(url: URL, *, server_id: int = 0, accept_unbounded_wal: bool = False) -> DatabaseLog:
    """The log of a database. `server_id`, `accept_unbounded_wal`: see Bridge. Raises InvalidRequest for a database
    without one."""
    kind = url.get_backend_name()
    if kind in ("mysql", "mariadb"):
        from notify.binlog_bridge.binlog.log import Binlog

        return Binlog(server_id)
    if kind == "postgresql":
        from notify.binlog_bridge.postgresql.log import Wal

        if server_id:
            raise InvalidRequest("--server-id is for MySQL and MariaDB: leave it out")
        return Wal(accept_unbounded_wal=accept_unbounded_wal)
    raise InvalidRequest(f"a bridge reads the log of MySQL, MariaDB or PostgreSQL; for {kind} there is `notify relay`")


def drop_slot(
    engine: Engine, name: str, schema: str | None, schemas: str | None, *, dry_run: bool = False
) -> dict[str, Any]:
    """Drop what a PostgreSQL keeps for a bridge, and return what there was: see Kept. `name`: the source's; "": its
    source id. `dry_run`: only look. Raises InvalidRequest for another database, or if a bridge reads the slot."""
    if engine.dialect.name != "postgresql":
        raise InvalidRequest("--drop-slot is for PostgreSQL: a binlog keeps nothing for its readers")
    from notify.binlog_bridge.postgresql import slot

    with engine.connect() as connection:
        named = name or _source_id(engine, Scope.of(connection, schema, schemas))
        kept = slot.kept_for(connection, slot.slot_name(named))
        return (kept if dry_run else slot.drop(connection, kept))._asdict()


def _source_id(engine: Engine, scope: Scope) -> str:
    with within_schema(engine, scope.schema).connect() as connection:
        if name := id_of(connection):
            return name
    raise InvalidRequest("the database has no source id: name the source, --dsn NAME=URL")


def takes_no_writes(connection: Connection) -> str:
    """Why rows of a source may not be changed here, "" if they may. Not on a replica, nor where this user may not see
    whether it is one: its primary would not have what was changed."""
    if is_read_only(connection):
        return IS_A_REPLICA
    if connection.dialect.name == "postgresql":
        return ""
    from notify.binlog_bridge.binlog.source import replicates, unseen_replica

    is_replica = replicates(connection)
    if is_replica is None:
        return "; ".join(f"{finding.what}: {finding.remedy}" for finding in unseen_replica(connection))
    return IS_A_REPLICA if is_replica else ""


def position_of(text: str) -> Position | None:
    """The position that a queue has stored; None if `text` is empty. Raises InvalidRequest."""
    if not text:
        return None
    return WalPosition.of(text) or BinlogPosition.of(text)


def foreign_to(connection: Connection, position: Position) -> Position | None:
    """The end of the source's own log, if a position is not of its history; None if it is."""
    if connection.dialect.name == "postgresql":
        from notify.binlog_bridge.postgresql.slot import current_position as end_of_wal

        end = end_of_wal(connection)
        # A place of another timeline may be left until the bridge has read what follows a failover.
        is_ours = isinstance(position, WalPosition) and replace(end, timeline=0).reaches(position)
        return None if is_ours else end
    from notify.binlog_bridge.binlog.source import contradicts, current_position

    now = current_position(connection)
    if isinstance(position, BinlogPosition) and now.reaches(position) and not contradicts(connection, position):
        return None
    return now


def end_of_log(connection: Connection) -> Position:
    """A position after all transactions that are committed now, which a bridge comes to even if nothing follows. On
    PostgreSQL it is a transaction; the connection's own is committed before."""
    if connection.dialect.name == "postgresql":
        from notify.binlog_bridge.postgresql import slot

        return slot.end_of_log(connection)
    from notify.binlog_bridge.binlog.source import current_position

    return current_position(connection)
