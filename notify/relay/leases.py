"""Which keys a relay moves, where several relays serve one database; and being woken when something came.

In PostgreSQL a bucket of key hashes is an advisory lock of the relay's session: it is free again in the moment that
the session ends, whatever ended it. Relays that are there hold a lock each, too, so that all can count them and take
only their share. In MySQL and MariaDB one relay holds all (a bridge serves them better), SQLite knows no sessions: a
second relay does no harm, since the queue knows ids, but the order per key is then only nearly kept.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.databases import KEEPALIVE, WAKE_CHANNEL, set_in_session
from notify.errors import InvalidRequest, Unavailable
from notify.pooler import REMEDY, TRANSACTION, pool_mode

BUCKETS = 32
STOP_SECONDS = 0.5
"""How long a relay that listens may take to notice that it is stopped."""
_BUCKET_CLASS, _PRESENCE_CLASS = 74_001, 74_002


class Leases(Protocol):
    """The leases of one relay."""

    def renew(self) -> bool:
        """Take this relay's share, give back what is more. False while it holds nothing."""
        ...

    def all(self) -> bool:
        """Whether everything is this relay's."""
        ...

    def mine(self, table: sa.Table) -> Any:
        """The condition on message 0 that a transaction is this relay's."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something came, so many seconds are over, or `stop` was called."""
        ...

    def stop(self) -> None:
        """Have `wait`, in another thread, return."""
        ...

    def close(self) -> None: ...


def leases_of(engine: Engine) -> Leases:
    """The leases that this kind of database allows."""
    if engine.dialect.name == "postgresql":
        return PostgreSqlLeases(engine)
    if engine.dialect.name in ("mysql", "mariadb"):
        return MySqlLease(engine)
    return NoLeases()


class NoLeases:
    """SQLite: everything is this relay's."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def renew(self) -> bool:
        return True

    def all(self) -> bool:
        return True

    def mine(self, table: sa.Table) -> Any:
        return sa.true()

    def wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        """Nothing is held."""


class MySqlLease(NoLeases):
    """One relay at a time: a named lock of its session."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._connection: Connection | None = None

    def renew(self) -> bool:
        if self._connection is None or self._connection.closed or self._connection.invalidated:
            self._connection = self._engine.connect()
        name = "CONCAT('notify-relay-', DATABASE())"
        held = self._connection.exec_driver_sql(f"SELECT IS_USED_LOCK({name}) = CONNECTION_ID()").scalar()
        got = held == 1 or self._connection.exec_driver_sql(f"SELECT GET_LOCK({name}, 0)").scalar() == 1
        self._connection.rollback()
        return got

    def close(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()


class PostgreSqlLeases:
    """Buckets by advisory locks, and LISTEN."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._me = int.from_bytes(os.urandom(3))
        self.held: set[int] = set()
        """The buckets that are this relay's."""
        self._lock = threading.Lock()
        self._stopping = False
        self._closed = False

    def renew(self) -> bool:
        with self._lock:
            return self._renew()

    def _renew(self) -> bool:
        connection = self._connected()
        relays = connection.exec_driver_sql(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted "
            f"AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            f"AND classid = {_PRESENCE_CLASS}"
        ).scalar()
        share = -(-BUCKETS // max(1, int(relays or 1)))
        for bucket in sorted(self.held)[share:]:
            connection.exec_driver_sql(f"SELECT pg_advisory_unlock({_BUCKET_CLASS}, {bucket})")
            self.held.discard(bucket)
        for step in range(BUCKETS):
            if len(self.held) >= share:
                break
            bucket = (self._me + step) % BUCKETS
            if bucket not in self.held:
                got = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_BUCKET_CLASS}, {bucket})").scalar()
                if got:
                    self.held.add(bucket)
        return bool(self.held)

    def _connected(self) -> Connection:
        """The session that holds the locks; with a new one they have to be taken anew.

        Raises what connecting does, and InvalidRequest for a pooler that gives each transaction another session.
        """
        if self._closed:
            # A relay that is stopped leaves a thread behind for a moment: it must not begin a session anew.
            raise Unavailable("this relay has stopped")
        if self._connection is not None and not self._connection.closed and not self._connection.invalidated:
            return self._connection
        self.held.clear()
        if pool_mode(self._engine) == TRANSACTION:
            raise InvalidRequest(REMEDY)
        self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._connection.exec_driver_sql(set_in_session(KEEPALIVE))
        self._connection.exec_driver_sql(f"SELECT pg_advisory_lock({_PRESENCE_CLASS}, {self._me})")
        self._connection.exec_driver_sql(f"LISTEN {WAKE_CHANNEL}")
        return self._connection

    def all(self) -> bool:
        return len(self.held) == BUCKETS

    def mine(self, table: sa.Table) -> Any:
        if len(self.held) == BUCKETS:
            return sa.true()
        hashed = sa.func.hashtext(sa.func.coalesce(table.c.key, table.c.transaction_id))
        return hashed.op("&")(BUCKETS - 1).in_(sorted(self.held))

    def wait(self, seconds: float) -> None:
        with self._lock:
            connection = self._connected()
        driver: Any = connection.connection.driver_connection
        until = time.monotonic() + seconds
        try:
            while not self._stopping and (left := until - time.monotonic()) > 0:
                for _ in driver.notifies(timeout=min(left, STOP_SECONDS), stop_after=1):
                    return
        except connection.dialect.loaded_dbapi.Error as error:  # the driver's own: SQLAlchemy takes no part in this
            connection.invalidate(error)
            raise Unavailable(f"the database ended the session that waits for new rows: {error}") from error

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.invalidate()  # the session ends, and its locks with it
                self._connection.close()
