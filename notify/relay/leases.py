"""Which keys a relay moves, where several relays serve one database; and being woken when something came.

In PostgreSQL a bucket of key hashes is an advisory lock of the relay's session: it is free again in the moment that
the session ends, whatever ended it. The database itself ends a session that is silent for LEASE_SECONDS, so that a
relay that is frozen, or whose machine is gone, loses its keys to the others. It does no harm when it wakes: the queue
knows ids. Relays that are there hold a lock each, too, so that all can count them and take only their share. In MySQL
and MariaDB one relay holds all (a bridge serves them better), SQLite knows no sessions: a second relay does no harm,
but the order per key is then only nearly kept.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.databases import KEEPALIVE, WAKE_CHANNEL, at_level, set_in_session
from notify.errors import InvalidRequest, Unavailable
from notify.pooler import REMEDY, TRANSACTION, pool_mode

BUCKETS = 32
LEASE_SECONDS = 20.0
"""How long a relay may be silent: then its session ends, and with it its leases. From version 14 of PostgreSQL on."""
LOCK_SECONDS = 10.0
"""How long a relay waits for rows that another session has locked, before it says so and tries again."""
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

    def condition(self, table: sa.Table) -> Any:
        """The condition on message 0 that a transaction is this relay's.

        By the key of message 0, since a transaction is sent whole, and of one key one relay alone may send: else two
        would overtake each other. One without a key goes by its id, so that such transactions spread over all relays.
        """
        ...

    def limit(self, connection: Connection) -> None:
        """Have the database end this transaction, too, where the relay is silent in it, since it holds rows, or waits
        for rows that somebody else holds."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something came, so many seconds are over, or `stop` was called."""
        ...

    def stop(self) -> None:
        """Have `wait`, in another thread, return."""
        ...

    def lose(self) -> None:
        """Give up what is held: the next `renew` begins with a new session."""
        ...

    def close(self) -> None: ...


def leases_of(engine: Engine, seconds: float = LEASE_SECONDS, *, alone: bool = False) -> Leases:
    """The leases that this kind of database allows; `seconds`: how long the relay may be silent.

    `alone`: one relay at a time is to hold all of them, the others none.
    """
    if engine.dialect.name == "postgresql":
        return PostgreSqlLeases(engine, seconds, alone=alone)
    if engine.dialect.name in ("mysql", "mariadb"):
        return MySqlLease(engine, seconds)
    return NoLeases()


class NoLeases:
    """SQLite: everything is this relay's."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def renew(self) -> bool:
        return True

    def all(self) -> bool:
        return True

    def condition(self, table: sa.Table) -> Any:
        return sa.true()

    def limit(self, connection: Connection) -> None:
        """A file's lock ends with the process only."""

    def wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def stop(self) -> None:
        self._stopping.set()

    def lose(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """As `lose`."""


class MySqlLease(NoLeases):
    """One relay at a time: a named lock of its session."""

    def __init__(self, engine: Engine, seconds: float = LEASE_SECONDS) -> None:
        """`seconds`: how long this relay may be silent, whole ones."""
        super().__init__()
        self._engine = engine
        self._seconds = seconds
        self._connection: Connection | None = None

    def renew(self) -> bool:
        if self._connection is None or self._connection.closed or self._connection.invalidated:
            self._connection = self._engine.connect()
            self._connection.exec_driver_sql(f"SET SESSION wait_timeout = {round(self._seconds)}")
        name = "CONCAT('notify-relay-', DATABASE())"
        held = self._connection.exec_driver_sql(f"SELECT IS_USED_LOCK({name}) = CONNECTION_ID()").scalar()
        got = held == 1 or self._connection.exec_driver_sql(f"SELECT GET_LOCK({name}, 0)").scalar() == 1
        self._connection.rollback()
        return got

    def limit(self, connection: Connection) -> None:
        # MySQL has no bound for a transaction: there it is one for the session, which the relay uses all the time.
        seconds = round(self._seconds)
        connection.exec_driver_sql(
            f"SET SESSION wait_timeout = {3 * seconds} /*M! , idle_transaction_timeout = {seconds} */"
        )

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stopping.wait(min(left, self._seconds / 4)):
            if left > self._seconds / 4:
                self.renew()

    def lose(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self.lose()


class PostgreSqlLeases:
    """Buckets by advisory locks, and LISTEN."""

    def __init__(self, engine: Engine, seconds: float = LEASE_SECONDS, *, alone: bool = False) -> None:
        """`seconds`: how long this relay may be silent. `alone`: it holds all keys or none, and shares with nobody."""
        self._engine = engine
        self._seconds = seconds
        self._alone = alone
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
        if self._alone:
            return self._take_all(connection)
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

    def _take_all(self, connection: Connection) -> bool:
        """All buckets or none, in one order: of two relays that begin at once, one gets the first, and so all."""
        for bucket in range(BUCKETS):
            if bucket in self.held:
                continue
            if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_BUCKET_CLASS}, {bucket})").scalar():
                for taken in self.held:
                    connection.exec_driver_sql(f"SELECT pg_advisory_unlock({_BUCKET_CLASS}, {taken})")
                self.held.clear()
                return False
            self.held.add(bucket)
        return True

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
        self._connection = self._engine.connect()
        at_level(self._connection, "AUTOCOMMIT")
        self._connection.exec_driver_sql(set_in_session(KEEPALIVE))
        # There is no such setting before version 14: then only the end of the session ends a lease.
        self._connection.exec_driver_sql(
            f"SELECT set_config(name, '{round(1000 * self._seconds)}', false) FROM pg_settings "
            "WHERE name = 'idle_session_timeout'"
        )
        self._connection.exec_driver_sql(f"SELECT pg_advisory_lock({_PRESENCE_CLASS}, {self._me})")
        self._connection.exec_driver_sql(f"LISTEN {WAKE_CHANNEL}")
        return self._connection

    def limit(self, connection: Connection) -> None:
        milliseconds = round(1000 * self._seconds)
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}")
        # The log says then that somebody holds its rows, and it can be stopped. MySQL has such a bound by itself.
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(1000 * min(LOCK_SECONDS, self._seconds))}")

    def all(self) -> bool:
        return len(self.held) == BUCKETS

    def condition(self, table: sa.Table) -> Any:
        if len(self.held) == BUCKETS:
            return sa.true()
        hashed = sa.func.hashtext(sa.func.coalesce(table.c.key, table.c.transaction_id))
        return hashed.op("&")(BUCKETS - 1).in_(sorted(self.held))

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            if self._is_told(min(left, self._seconds / 4)):
                return
            with self._lock:
                self._connected().exec_driver_sql("SELECT 1")  # not silent for too long

    def _is_told(self, seconds: float) -> bool:
        """Whether a commit wakes this relay within so many seconds. Raises Unavailable where the session has ended."""
        with self._lock:
            connection = self._connected()
        driver: Any = connection.connection.driver_connection
        until = time.monotonic() + seconds
        try:
            while not self._stopping and (left := until - time.monotonic()) > 0:
                for _ in driver.notifies(timeout=min(left, STOP_SECONDS), stop_after=1):
                    return True
        except connection.dialect.loaded_dbapi.Error as error:  # the driver's own: SQLAlchemy takes no part in this
            connection.invalidate(error)
            raise Unavailable(f"the database ended the session that waits for new rows: {error}") from error
        return False

    def stop(self) -> None:
        self._stopping = True

    def lose(self) -> None:
        with self._lock:
            self._end_session()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end_session()

    def _end_session(self) -> None:
        """And with it its locks."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
        self.held.clear()
