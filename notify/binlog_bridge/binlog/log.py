"""The binlog of one source, as a bridge uses it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.binlog_bridge.binlog import rights, source
from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.reader import BinlogReader, Quiet
from notify.binlog_bridge.binlog.tables import OURS
from notify.binlog_bridge.errors import Unfit, Warnings, refuse
from notify.binlog_bridge.log import LogSnapshot, Retained
from notify.binlog_bridge.scope import OWN, Scope
from notify.errors import Unavailable
from notify.runtime.databases import has_table
from notify.storage.sql.checkup import Finding, is_mariadb

FIRST_SERVER_ID = 740_000_000


def default_server_id(name: str) -> int:
    """A server id that depends on the source's name alone, so that it is the same at each start of a bridge."""
    return FIRST_SERVER_ID + zlib.crc32(name.encode()) % 1_000_000


STALLED_HEARTBEATS = 2
"""A heartbeat that comes after a change may have been sent before it."""


class Stall:
    """Recognises a stream that has fallen silent although its connection lives: after a RESET of the binlog a source
    waits for the end of a file that is gone, and sends heartbeats for ever."""

    def __init__(self) -> None:
        self._end: tuple[int, int] | None = None
        self._quiet = Quiet()
        self._moved: Quiet | None = None
        """The stream's silence when the end of the log was first seen to have moved meanwhile."""

    def has_stalled(self, end: tuple[int, int] | None, quiet: Quiet) -> bool:
        """Whether the end of the source's log has gone back, or heartbeats still name the place from before it moved.
        `end`: None if it is not known."""
        earlier, before = self._end, self._quiet
        self._end, self._quiet = end, quiet
        if end is None or earlier is None:
            return False
        if not (quiet.heartbeats >= before.heartbeats > 0 and quiet.place == before.place):
            self._moved = None
        elif self._moved is None and end != earlier:
            self._moved = quiet
        return end < earlier or (
            self._moved is not None and quiet.heartbeats >= self._moved.heartbeats + STALLED_HEARTBEATS
        )


class Binlog:
    """See DatabaseLog."""

    takes_tables_first = False
    """A binlog may have everything since its first file; where it has not, its server says so."""

    def __init__(self, server_id: int = 0) -> None:
        """`server_id`: the reader's id as a replica; 0: it is made from the source's name."""
        self._server_id = server_id
        self._mariadb = False
        self._scope = OWN
        self._reader: BinlogReader | None = None
        self._stall = Stall()
        self._warnings = Warnings()

    def check(
        self, connection: Connection, name: str, scope: Scope, schemas: Sequence[str] | None, *, fill: bool
    ) -> None:
        server_id = self._server_id or default_server_id(name)
        refuse(finding for finding in source.findings(connection, server_id, schemas) if finding.stops)
        self._mariadb = is_mariadb(connection)
        self._server_id = server_id
        self._scope = scope

    def findings(self, connection: Connection, name: str, scope: Scope) -> list[Finding]:
        return source.findings(connection, self._server_id or default_server_id(name))

    def watch(self, engine: Engine) -> Retained | None:
        with engine.connect() as connection:
            end = source.end_of_file(connection)
            if not self._scope.is_many and not any(has_table(connection, name, self._scope.schema) for name in OURS):
                where = self._scope.schema or engine.url.database
                self._warnings.say("the tables were renamed, moved or dropped: nothing is read", where)
        if self._reader is not None and self._stall.has_stalled(end, self._reader.quiet):
            raise Unavailable(
                "the source writes its binlog, and sends nothing of it (was there a RESET BINARY LOGS or RESET MASTER?)"
            )
        return None

    def stopped_at(self, text: str) -> str:
        """A bridge stops before the events that it cannot read, and so does the next one."""
        return text

    def denied(self, error: BaseException | None) -> str | None:
        return rights.denied(error.orig if isinstance(error, sa.exc.DBAPIError) else error)

    def check_kind(self, position: Any) -> None:
        if position is None:
            return
        if not isinstance(position, Position):
            theirs, ours = "PostgreSQL", "MariaDB" if self._mariadb else "MySQL"
        elif not position.gtids or (":" in position.gtids) != self._mariadb:
            return
        else:
            theirs, ours = ("MySQL", "MariaDB") if self._mariadb else ("MariaDB", "MySQL")
        raise Unfit(
            f"the queue's position for this source, {position.shown[:60]}, is of {theirs}, but this server is a "
            f"{ours}: start with --backfill, which sends the missing messages, and then continues"
        )

    def reader(
        self,
        engine: Engine,
        position: Any,
        *,
        scope: Scope,
        source_us: Callable[[], int],
        known_seconds: float,
        most_bytes: Callable[[], int],
    ) -> BinlogReader:
        self._stall = Stall()
        self._reader = BinlogReader(
            engine.url,
            self._server_id,
            position,
            mariadb=self._mariadb,
            source_us=source_us,
            scope=scope,
            known_seconds=known_seconds,
            most_bytes=most_bytes,
        )
        return self._reader

    def prepare_backfill(self, engine: Engine) -> None:
        """A server has one binlog for all readers, and nothing to make."""

    def snapshot(self, engine: Engine) -> LogSnapshot:
        connection = engine.connect()
        try:
            position = replace(source.begin_snapshot(connection), scope=self._scope.text)
            until = position if is_mariadb(connection) else source.current_position(connection)
        except BaseException:
            connection.close()
            raise
        return LogSnapshot(connection, position, until)
