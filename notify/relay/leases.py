"""Leases: they divide the keys of one database among several relays. Also wakes a relay when rows arrive.

In PostgreSQL a bucket of key hashes is an advisory lock of the relay's session: it is free as soon as the session ends,
for whatever reason. The database ends a session that is silent for LEASE_SECONDS, so that a relay that is frozen, or
whose machine is gone, loses its keys to other relays. It does no harm when it wakes up, because the queue knows ids.
Each running relay also holds a lock that shows its presence, so that all relays can count them and take only their
share. In MySQL and MariaDB one relay holds all keys (a bridge serves these databases better). SQLite has no sessions: a
second relay does no harm there, but the order per key may then be broken now and then.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.databases import KEEPALIVE, WAKE_CHANNEL, at_level, set_in_session
from notify.errors import InvalidRequest, Unavailable
from notify.pooler import REMEDY, TRANSACTION, pool_mode

BUCKETS = 32
LEASE_SECONDS = 20.0
"""How long a relay may be silent before its session ends with its leases; needs PostgreSQL 14 or later."""
LOCK_SECONDS = 10.0
"""How long a relay waits for rows or a table that another session has locked, before it logs that and tries again."""
STOP_SECONDS = 0.5
"""How long a listening relay may take to notice that it is stopped."""
_BUCKET_CLASS, _PRESENCE_CLASS = 74_001, 74_002


class Leases(Protocol):
    """The leases of one relay."""

    def renew(self) -> bool:
        """Take this relay's share of the keys, and release the rest. False if it holds no keys."""
        ...

    def all(self) -> bool:
        """Whether this relay holds all keys."""
        ...

    def condition(self, table: sa.Table) -> Any:
        """The SQL condition, on message 0 of a transaction, that this relay sends the transaction.

        It uses the key of message 0, because a transaction is sent as a whole, and only one relay may send messages of
        a key: two relays would break the order. Without a key it uses the id, so that all relays share the work.
        """
        ...

    def limit(self, connection: Connection) -> None:
        """Bound this transaction: the database ends it if the relay is silent, or waits too long for a lock."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when rows may have arrived, after `seconds`, or when `stop` was called."""
        ...

    def stop(self) -> None:
        """End a `wait` in another thread."""
        ...

    def lose(self) -> None:
        """Release all keys; the next `renew` begins a new session."""
        ...

    def close(self) -> None: ...


def leases_of(engine: Engine, seconds: float = LEASE_SECONDS, *, alone: bool = False) -> Leases:
    """The leases for this kind of database; `seconds`: how long the relay may be silent.

    `alone`: one relay at a time holds all keys, the others none.
    """
    if engine.dialect.name == "postgresql":
        return PostgreSqlLeases(engine, seconds, alone=alone)
    if engine.dialect.name in ("mysql", "mariadb"):
        return MySqlLease(engine, seconds)
    return NoLeases()


class NoLeases:
    """Leases for SQLite: every relay holds all keys."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def renew(self) -> bool:
        return True

    def all(self) -> bool:
        return True

    def condition(self, table: sa.Table) -> Any:
        return sa.true()

    def limit(self, connection: Connection) -> None:
        """Does nothing: the lock of a SQLite file ends only with the process."""

    def wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def stop(self) -> None:
        self._stopping.set()

    def lose(self) -> None:
        """Does nothing: there are no locks to release."""

    def close(self) -> None:
        """Does nothing, like `lose`."""


_IS_HELD = sa.text("SELECT IS_USED_LOCK(:name) = CONNECTION_ID()")
_TAKE = sa.text("SELECT GET_LOCK(:name, 0)")
_LOCK_NAME_CHARACTERS = 64
"""The longest name of a lock on MySQL; MariaDB takes three times as many."""


def lock_name(database: str) -> str:
    """The name of the lock that the relay of a database holds on its MySQL or MariaDB server.

    It has a digest of the database's name if that is too long, or has capital letters: the servers take two names of
    locks that differ in case for one.
    """
    name = f"notify-relay-{database}"
    if len(name) <= _LOCK_NAME_CHARACTERS and name.isascii() and name == name.lower():
        return name
    return f"notify-relay-{hashlib.blake2b(database.encode(), digest_size=16).hexdigest()}"


class MySqlLease(NoLeases):
    """A lease for MySQL and MariaDB: one relay at a time holds a named lock of its session."""

    def __init__(
        self, engine: Engine, seconds: float = LEASE_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: how long this relay may be silent, rounded to whole seconds. `monotonic`: a clock in seconds."""
        super().__init__()
        self._monotonic = monotonic
        self._engine = engine
        self._seconds = seconds
        self._connection: Connection | None = None

    def renew(self) -> bool:
        if self._connection is None or self._connection.closed or self._connection.invalidated:
            self._connection = self._engine.connect()
            self._connection.exec_driver_sql(f"SET SESSION wait_timeout = {round(self._seconds)}")
        database = str(self._connection.exec_driver_sql("SELECT DATABASE()").scalar() or "")
        name = {"name": lock_name(database)}
        is_held = self._connection.execute(_IS_HELD, name).scalar() == 1
        is_held = is_held or self._connection.execute(_TAKE, name).scalar() == 1
        self._connection.rollback()
        return is_held

    def limit(self, connection: Connection) -> None:
        # MySQL has no bound for a transaction, so the session is bounded there, which the relay uses all the time.
        seconds = round(self._seconds)
        # By default a statement waits for a table's lock for a day.
        lock_seconds = max(1, round(min(LOCK_SECONDS, self._seconds)))
        connection.exec_driver_sql(
            f"SET SESSION wait_timeout = {3 * seconds}, lock_wait_timeout = {lock_seconds}, innodb_lock_wait_timeout = "
            f"{lock_seconds} /*M! , idle_transaction_timeout = {seconds} */"
        )

    def wait(self, seconds: float) -> None:
        until = self._monotonic() + seconds
        while (remaining := until - self._monotonic()) > 0 and not self._is_woken(min(remaining, self._seconds / 4)):
            if remaining > self._seconds / 4:
                self.renew()

    def _is_woken(self, seconds: float) -> bool:
        """Whether `stop` is called within `seconds`."""
        return self._stopping.wait(seconds)

    def lose(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self.lose()


class PostgreSqlLeases:
    """Leases for PostgreSQL: buckets of keys by advisory locks; LISTEN wakes the relay."""

    def __init__(
        self,
        engine: Engine,
        seconds: float = LEASE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        alone: bool = False,
    ) -> None:
        """`seconds`: how long this relay may be silent. `monotonic`: a clock in seconds. `alone`: it holds either all
        keys or none."""
        self._engine = engine
        self._monotonic = monotonic
        self._seconds = seconds
        self._alone = alone
        self._connection: Connection | None = None
        self._presence_id = int.from_bytes(os.urandom(3))
        self.held: set[int] = set()
        """The buckets that this relay holds."""
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
            bucket = (self._presence_id + step) % BUCKETS
            if bucket not in self.held:
                is_locked = connection.exec_driver_sql(
                    f"SELECT pg_try_advisory_lock({_BUCKET_CLASS}, {bucket})"
                ).scalar()
                if is_locked:
                    self.held.add(bucket)
        return bool(self.held)

    def _take_all(self, connection: Connection) -> bool:
        """Take all buckets or none, in a fixed order: only one of two relays gets the first bucket, and then all."""
        for bucket in range(BUCKETS):
            if bucket in self.held:
                continue
            if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_BUCKET_CLASS}, {bucket})").scalar():
                for locked in self.held:
                    connection.exec_driver_sql(f"SELECT pg_advisory_unlock({_BUCKET_CLASS}, {locked})")
                self.held.clear()
                return False
            self.held.add(bucket)
        return True

    def _connected(self) -> Connection:
        """The session that holds the locks; a new session begins without locks.

        Raises the errors of connecting, and InvalidRequest for a pooler that gives each transaction another session.
        """
        if self._closed:
            # A stopped relay leaves a thread behind for a moment, which must not begin another session.
            raise Unavailable("this relay has stopped")
        if self._connection is not None and not self._connection.closed and not self._connection.invalidated:
            return self._connection
        self.held.clear()
        if pool_mode(self._engine) == TRANSACTION:
            raise InvalidRequest(REMEDY)
        self._connection = self._engine.connect()
        at_level(self._connection, "AUTOCOMMIT")
        self._connection.exec_driver_sql(set_in_session(KEEPALIVE))
        # PostgreSQL before version 14 does not have this setting: there a lease ends only with the connection.
        self._connection.exec_driver_sql(
            f"SELECT set_config(name, '{round(1000 * self._seconds)}', false) FROM pg_settings "
            "WHERE name = 'idle_session_timeout'"
        )
        self._connection.exec_driver_sql(f"SELECT pg_advisory_lock({_PRESENCE_CLASS}, {self._presence_id})")
        self._connection.exec_driver_sql(f"LISTEN {WAKE_CHANNEL}")
        return self._connection

    def limit(self, connection: Connection) -> None:
        # With a bound for locks, a relay can log that it waits for one, and can be stopped.
        connection.exec_driver_sql(
            f"SELECT set_config('idle_in_transaction_session_timeout', '{round(1000 * self._seconds)}', true), "
            f"set_config('lock_timeout', '{round(1000 * min(LOCK_SECONDS, self._seconds))}', true)"
        )

    def all(self) -> bool:
        return len(self.held) == BUCKETS

    def condition(self, table: sa.Table) -> Any:
        if len(self.held) == BUCKETS:
            return sa.true()
        hashed = sa.func.hashtext(sa.func.coalesce(table.c.key, table.c.transaction_id))
        return hashed.op("&")(BUCKETS - 1).in_(sorted(self.held))

    def wait(self, seconds: float) -> None:
        until = self._monotonic() + seconds
        while not self._stopping and (remaining := until - self._monotonic()) > 0:
            if self._is_woken(min(remaining, self._seconds / 4)):
                return
            with self._lock:
                self._connected().exec_driver_sql("SELECT 1")  # keeps the session from being silent for too long

    def _is_woken(self, seconds: float) -> bool:
        """Whether a commit wakes this relay within `seconds`. Raises Unavailable if the session has ended."""
        with self._lock:
            connection = self._connected()
        driver: Any = connection.connection.driver_connection
        until = time.monotonic() + seconds
        try:
            while not self._stopping and (remaining := until - time.monotonic()) > 0:
                for _ in driver.notifies(timeout=min(remaining, STOP_SECONDS), stop_after=1):
                    return True
        except connection.dialect.loaded_dbapi.Error as error:  # the driver's error, since SQLAlchemy is not involved
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
        """End the session, and with it all locks."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
        self.held.clear()
