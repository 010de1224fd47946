"""A replication connection to PostgreSQL: psycopg opens it, and libpq's own functions serve it.

psycopg's cursors do not speak the replication protocol; `PGconn` lets its commands and its copy in both directions
through. https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import select
import time
from typing import Any, NamedTuple

import psycopg
from psycopg import pq
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.errors import Damaged, Purged, Unfit
from notify.binlog_bridge.postgresql.position import lsn_of
from notify.binlog_bridge.postgresql.rights import denied
from notify.errors import Unavailable
from notify.runtime.databases import CLIENT_KEEPALIVE, MOVER_SETTINGS, set_in_session
from notify.storage.sql.engines import with_driver

COMMAND_SECONDS = 30.0
_GOOD = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COPY_BOTH)
SENDER_SECONDS = 60.0
_SENDER_TIMEOUT = (
    "SELECT set_config('wal_sender_timeout', '{0}ms', false) FROM pg_settings "
    "WHERE name = 'wal_sender_timeout' AND CAST(setting AS int) < {0}"
)
"""The timeout is PostgreSQL's default. A server without one would keep the slot of a machine that is gone busy. A
longer one stays: up to version 15 PostgreSQL ends a connection while it decodes a large REFRESH MATERIALIZED VIEW."""


class Identity(NamedTuple):
    """The identifier of a cluster, its present timeline, and when its server was started: see Position."""

    system: str
    timeline: int
    started: int


class Replication:
    """A connection for one owner. A context manager closes it."""

    def __init__(self, url: URL, *, lock_seconds: float = 0.0) -> None:
        """Connects. `lock_seconds`: how long the source waits for each lock, and for each other transaction; 0: without
        a bound. Raises Unavailable if the source does not answer, Unfit if it refuses this user."""
        _, arguments = with_driver(url).get_dialect()().create_connect_args(url)
        arguments.pop("context", None)
        self._settings: dict[str, Any] = {"connect_timeout": 5} | CLIENT_KEEPALIVE | dict(arguments)
        self._settings["client_encoding"] = "utf8"
        own = {"bytea_output": "hex", "lock_timeout": f"{round(lock_seconds * 1000)}ms"}
        self._set_up = set_in_session({**MOVER_SETTINGS, **own})
        self._connection = self._connected(replication="database")
        self.pgconn = self._connection.pgconn
        try:
            self.command(self._set_up)
            self.command(_SENDER_TIMEOUT.format(round(SENDER_SECONDS * 1000)))
        except BaseException:
            self.close()
            raise

    def _connected(self, **further: str) -> psycopg.Connection[Any]:
        settings: dict[str, Any] = self._settings | further | {"autocommit": True}
        try:
            return psycopg.connect(**settings)
        except psycopg.Error as error:
            raise refusal(error) from error

    def plain_connection(self) -> psycopg.Connection[Any]:
        """A plain connection to the same database; the caller closes it. Raises as the constructor does."""
        connection = self._connected()
        try:
            connection.execute(self._set_up.encode())
        except psycopg.Error as error:
            connection.close()
            raise refusal(error) from error
        return connection

    def __enter__(self) -> Replication:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def identity(self) -> Identity:
        row = self.command("IDENTIFY_SYSTEM")[0]
        started = self.command("SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint)")[0][0]
        return Identity(row[0], int(row[1]), int(started))

    def command(self, text: str, *, seconds: float = COMMAND_SECONDS, late: str = "") -> list[list[str]]:
        """Run a command or query; its rows as texts ("" for NULL). `late`: the error's text if it is not done in time.

        Raises Unavailable, Purged, Unfit.
        """
        pgconn = self.pgconn
        deadline = time.monotonic() + seconds
        try:
            pgconn.send_query(text.encode())
            while pgconn.flush():
                self._wait(deadline, late, for_write=True)
            results = []
            while True:
                while pgconn.is_busy():
                    self._wait(deadline, late)
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is None:
                    break
                if result.status not in _GOOD:
                    error = psycopg.errors.error_from_result(result)
                    raise Unavailable(late) if late and error.sqlstate == _LOCKED else refusal(error)
                results.append(result)
                if result.status == pq.ExecStatus.COPY_BOTH:
                    break
        except psycopg.Error as error:
            raise refusal(error) from error
        last = results[-1]
        return [
            [(last.get_value(row, column) or b"").decode() for column in range(last.nfields)]
            for row in range(last.ntuples)
        ]

    def _wait(self, deadline: float, late: str, *, for_write: bool = False) -> None:
        left = deadline - time.monotonic()
        wanted = [self.pgconn.socket]
        if left <= 0 or not any(select.select([] if for_write else wanted, wanted if for_write else [], [], left)):
            raise Unavailable(late or "the source does not answer a command of replication")


def lost_history(replication: Replication, timeline: int, lsn: int, now: int) -> int | None:
    """Where the history of the present timeline `now` left another one, if that is before `lsn`; None if a position in
    that timeline is part of the present history. Raises Purged if the timeline is not an ancestor of it."""
    content = ""
    if now > timeline:  # a timeline has a greater number than those that it comes from, and the first has no history
        content = replication.command(f"TIMELINE_HISTORY {now}")[0][1]
        content = bytes.fromhex(content[2:]).decode() if content.startswith("\\x") else content
    for line in content.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == str(timeline):
            left_at = lsn_of(words[1])
            return left_at if lsn > left_at else None
    raise Purged(
        f"the source is in timeline {now}, which does not come from timeline {timeline} of this bridge's position: it "
        "was restored from a backup, or is an old primary that was started again. If it is the primary now, start with "
        "--backfill; nothing was skipped"
    )


_BUSY, _NO_SUCH, _NOT_READY, _NO_FILE, _LOCKED = "55006", "42704", "55000", "58P01", "55P03"
_BROKEN = ("22", "42", "54", "XX")
"""The classes of errors with which the source ends a stream at the same place each time."""


def refusal(error: psycopg.Error) -> Exception:
    """The error that a bridge raises for one of the driver's."""
    text = str(error).strip().replace("\n", "; ")
    state = error.sqlstate or ""
    if state == _BUSY:
        return Unavailable(f"the slot is read by another connection, perhaps this bridge's own last one ({text})")
    is_of_slot = "slot" in text.lower()  # also in the languages of many servers
    if state == _NO_SUCH and not is_of_slot:
        return Unfit(
            f"{text}: the publication was dropped, or made after the slot. Start this bridge with --backfill, which "
            "makes both, and takes from the tables what is missing"
        )
    if state in (_NO_SUCH, _NOT_READY) and is_of_slot:
        return Purged(
            f"the source does not have what follows this bridge's position ({text}). Nothing was skipped: start with "
            "--backfill, which makes the slot, sends the missing messages from the tables, and then continues"
        )
    if state == _NO_FILE:
        return Purged(
            f"the source lacks a file of its log ({text}). Nothing was skipped: start with --backfill, which sends the "
            "missing messages from the tables"
        )
    why = denied(error)
    if why is not None:
        return Unfit(f"the source refuses to be read: {why}")
    return Unavailable(f"the source does not answer: {text}")


def ending(error: psycopg.Error) -> Exception:
    """The error for one with which the source ends a stream: it may do so at the same place each time."""
    found = refusal(error)
    if isinstance(found, Unavailable) and (error.sqlstate or "").startswith(_BROKEN):
        return Damaged(f"the source cannot decode its log: {str(error).strip().splitlines()[0]}")
    return found
