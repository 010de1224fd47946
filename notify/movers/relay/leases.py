"""Leases: they divide the keys of one schema among several relays. Also wakes a relay when rows arrive.

In PostgreSQL a bucket of key hashes is an advisory lock of the relay's session, named by the schema: it is free as soon
as the session ends, for whatever reason. The database ends a session that is silent for LEASE_SECONDS, so that a relay
that is frozen, or whose machine is gone, loses its keys to other relays. It does no harm when it wakes up, because the
queue knows ids. A relay that works on a schema also holds a lock that shows its presence there, so that all relays can
count them and take only their share. A relay of many schemas holds the keys of one at a time: the locks of a PostgreSQL
server are few (`max_locks_per_transaction`). In MySQL and MariaDB one relay holds all keys of a schema (a bridge serves
these databases better). SQLite has no sessions: a second relay does no harm there, but the order per key may then be
broken now and then.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Container
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.errors import InvalidRequest, Unavailable
from notify.runtime.databases import KEEPALIVE, WAKE_CHANNEL, at_level, is_read_only, set_in_session
from notify.runtime.pooler import REMEDY, TRANSACTION, pool_mode

BUCKETS = 32
LEASE_SECONDS = 20.0
"""How long a relay may be silent before its session ends with its leases; needs PostgreSQL 14 or later."""
LOCK_SECONDS = 10.0
"""How long a relay waits for rows or a table that another session has locked, before it logs that and tries again."""
LOOK_LOCK_SECONDS = 0.5
"""How long a look for waiting rows waits for a table that another session has locked: other schemas wait behind it."""
STOP_SECONDS = 0.5
"""How long a listening relay may take to notice that it is stopped."""
_BUCKET, _PRESENCE = 74_100, 74_002
"""The second numbers of a relay's locks; the first number is the schema's in PostgreSQL's catalogue."""
T = TypeVar("T")


class Leases(Protocol):
    """The leases of one relay."""

    def renew(self, schema: str) -> bool:
        """Take this relay's share of the keys of a schema, and release what it holds of another. False if it holds no
        keys of the schema."""
        ...

    def all(self) -> bool:
        """Whether this relay holds all keys of the schema that was renewed last."""
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

    def read(self, function: Callable[[Connection], T]) -> T:
        """Call a function that reads, each statement for itself, with the session that holds the leases."""
        ...

    def wait(self, seconds: float, schemas: Container[str]) -> set[str]:
        """Return when rows may have arrived in one of these schemas, after `seconds`, or when `stop` was called.

        The result names the schemas that have new rows; "" stands for any. It takes all notifications that have come.
        """
        ...

    def arrived(self) -> set[str]:
        """The schemas that notifications have named since they were last taken, without waiting."""
        ...

    def leave(self) -> None:
        """Release all keys, since nothing waits. The session stays."""
        ...

    def stop(self) -> None:
        """End a `wait` in another thread."""
        ...

    def lose(self) -> None:
        """End the session, and with it all locks; the next use begins a new one."""
        ...

    def close(self) -> None: ...


def leases_of(
    engine: Engine, seconds: float = LEASE_SECONDS, *, alone: bool = False, among_many: bool = False
) -> Leases:
    """The leases for this kind of database; `seconds`: how long the relay may be silent.

    `alone`: one relay at a time holds all keys of a schema, the others none. `among_many`: the relay serves many
    schemas, and waits for a lock in one of them only briefly.
    """
    if engine.dialect.name == "postgresql":
        return PostgreSqlLeases(engine, seconds, alone=alone, among_many=among_many)
    if engine.dialect.name in ("mysql", "mariadb"):
        return MySqlLease(engine, seconds, among_many=among_many)
    return NoLeases(engine)


def _lock_seconds(seconds: float, among_many: bool) -> float:
    """How long a relay's transaction waits for a lock."""
    return min(LOCK_SECONDS, seconds, LOOK_LOCK_SECONDS if among_many else LOCK_SECONDS)


class NoLeases:
    """Leases for SQLite: every relay holds all keys."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stopping = threading.Event()

    def renew(self, schema: str) -> bool:
        return True

    def all(self) -> bool:
        return True

    def condition(self, table: sa.Table) -> Any:
        return sa.true()

    def limit(self, connection: Connection) -> None:
        """Does nothing: the lock of a SQLite file ends only with the process."""

    def read(self, function: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return function(at_level(connection, "AUTOCOMMIT"))  # no transaction, which would keep writers out

    def wait(self, seconds: float, schemas: Container[str]) -> set[str]:
        self._stopping.wait(seconds)
        return set()

    def arrived(self) -> set[str]:
        return set()

    def leave(self) -> None:
        """Does nothing: there are no locks to release."""

    def stop(self) -> None:
        self._stopping.set()

    def lose(self) -> None:
        """Does nothing, like `leave`."""

    def close(self) -> None:
        """Does nothing, like `leave`."""


_IS_HELD = sa.text("SELECT IS_USED_LOCK(:name) = CONNECTION_ID()")
_TAKE = sa.text("SELECT GET_LOCK(:name, 0)")
_RELEASE = sa.text("SELECT RELEASE_LOCK(:name)")
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
    """A lease for MySQL and MariaDB: one relay at a time holds a named lock of its session for a schema, which is a
    database there."""

    def __init__(
        self,
        engine: Engine,
        seconds: float = LEASE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        among_many: bool = False,
    ) -> None:
        """`seconds`: how long this relay may be silent, rounded to whole seconds. `monotonic`: a clock in seconds."""
        super().__init__(engine)
        self._monotonic = monotonic
        self._seconds = seconds
        self._among_many = among_many
        self._connection: Connection | None = None
        self._held = ""
        """The schema whose lock was taken last."""

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None or connection.closed or connection.invalidated:
            self._held = ""
            self._connection = connection = self._engine.connect()
            at_level(connection, "AUTOCOMMIT")
            connection.exec_driver_sql(
                f"SET SESSION wait_timeout = {round(self._seconds)}, "
                f"lock_wait_timeout = {max(1, round(LOOK_LOCK_SECONDS))}"
            )
        return connection

    def renew(self, schema: str) -> bool:
        connection = self._connected()
        if self._held not in ("", schema):
            self.leave()
        name = {"name": lock_name(schema)}
        if self._held and connection.execute(_IS_HELD, name).scalar() == 1:
            return True
        # Taken only where it is not held: a lock that was taken twice has to be released twice.
        self._held = schema if connection.execute(_TAKE, name).scalar() == 1 else ""
        return bool(self._held)

    def all(self) -> bool:
        return bool(self._held)

    def leave(self) -> None:
        if self._held and self._connection is not None and not self._connection.invalidated:
            self._connection.execute(_RELEASE, {"name": lock_name(self._held)})
        self._held = ""

    def limit(self, connection: Connection) -> None:
        # MySQL has no bound for a transaction, so the session is bounded there, which the relay uses all the time.
        seconds = round(self._seconds)
        # By default a statement waits for a table's lock for a day.
        lock_seconds = max(1, round(_lock_seconds(self._seconds, self._among_many)))
        connection.exec_driver_sql(
            f"SET SESSION wait_timeout = {3 * seconds}, lock_wait_timeout = {lock_seconds}, innodb_lock_wait_timeout = "
            f"{lock_seconds} /*M! , idle_transaction_timeout = {seconds} */"
        )

    def read(self, function: Callable[[Connection], T]) -> T:
        return function(self._connected())

    def wait(self, seconds: float, schemas: Container[str]) -> set[str]:
        until = self._monotonic() + seconds
        while (remaining := until - self._monotonic()) > 0 and not self._is_woken(min(remaining, self._seconds / 2)):
            if remaining > self._seconds / 2:
                self._connected().exec_driver_sql("DO 0")  # keeps the session from being silent for too long
        return set()

    def _is_woken(self, seconds: float) -> bool:
        """Whether `stop` is called within `seconds`."""
        return self._stopping.wait(seconds)

    def lose(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
        self._held = ""

    def close(self) -> None:
        self.lose()


_THE_SCHEMA = "FROM pg_catalog.pg_namespace n WHERE n.nspname = :schema"
_SHOW_PRESENCE = f"pg_advisory_lock_shared(n.oid::int4, {_PRESENCE})::text"
_OTHERS = (
    "(SELECT count(*) FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_backend_pid() "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND l.classid = n.oid AND l.objid = {_PRESENCE})"
)
_BEGIN = sa.text(f"SELECT n.oid::int4, {_OTHERS}, {_SHOW_PRESENCE} {_THE_SCHEMA}")
_COUNT = sa.text(f"SELECT n.oid::int4, {_OTHERS} {_THE_SCHEMA}")
_TRY = sa.text(
    "SELECT bucket FROM unnest(CAST(:buckets AS int4[])) bucket "
    f"WHERE pg_try_advisory_lock(:schema, {_BUCKET} + bucket)"
)
_UNLOCK = sa.text(
    f"SELECT pg_advisory_unlock(:schema, {_BUCKET} + bucket) FROM unnest(CAST(:buckets AS int4[])) bucket"
)


class PostgreSqlLeases:
    """Leases on buckets of keys: advisory locks of a session, which also listens for commits.

    Bounded by PostgreSQL 14 and later to `seconds` of silence.
    """

    def __init__(
        self,
        engine: Engine,
        seconds: float = LEASE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        alone: bool = False,
        among_many: bool = False,
    ) -> None:
        """`seconds`: how long this relay may be silent. `monotonic`: a clock in seconds. `alone`, `among_many`: see
        `leases_of`."""
        self._engine = engine
        self._monotonic = monotonic
        self._seconds = seconds
        self._alone, self._among_many = alone, among_many
        self._connection: Connection | None = None
        self._first_bucket = int.from_bytes(os.urandom(1)) % BUCKETS
        self._schema = ""
        """The schema in which it shows its presence, "" for none."""
        self._number = 0
        """The number of the schema in the catalogue: a schema that is dropped and recreated has another one."""
        self.held: set[int] = set()
        """The buckets of that schema that this relay holds."""
        self._lock = threading.RLock()
        self._stopping = False
        self._closed = False

    def renew(self, schema: str) -> bool:
        with self._lock:
            connection = self._connected()
            if schema != self._schema:
                self.leave()
            others = self._count_others(connection, schema)
            if others is None:
                return False
            if self._alone:
                return self._take_all(connection)
            share = -(-BUCKETS // (1 + others))
            self._release(connection, sorted(self.held)[share:])
            wanted = [b % BUCKETS for b in range(self._first_bucket, self._first_bucket + BUCKETS)]
            free = [bucket for bucket in wanted if bucket not in self.held]
            while free and len(self.held) < share:
                chosen, free = free[: share - len(self.held)], free[share - len(self.held) :]
                self._try(connection, chosen)
            return bool(self.held)

    def _count_others(self, connection: Connection, schema: str) -> int | None:
        """How many other relays work on a schema, in which this one shows its presence; None if there is no schema."""
        row = connection.execute(_COUNT if self._schema else _BEGIN, {"schema": schema}).first()
        if self._schema and (row is None or row[0] != self._number):  # it was dropped, and maybe recreated
            self.leave()
            row = connection.execute(_BEGIN, {"schema": schema}).first()
        if row is None:
            return None
        self._schema, self._number = schema, int(row[0])
        return int(row[1])

    def _take_all(self, connection: Connection) -> bool:
        """Take all buckets or none: only one of two relays gets the first bucket, and then the others."""
        for buckets in ([0], list(range(1, BUCKETS))):
            missing = [bucket for bucket in buckets if bucket not in self.held]
            if missing:
                self._try(connection, missing)
            if not self.held.issuperset(buckets):
                self._release(connection, sorted(self.held))
                return False
        return True

    def _try(self, connection: Connection, buckets: list[int]) -> None:
        self.held.update(connection.scalars(_TRY, {"schema": self._number, "buckets": buckets}))

    def _release(self, connection: Connection, buckets: list[int]) -> None:
        if buckets:
            connection.execute(_UNLOCK, {"schema": self._number, "buckets": buckets}).all()
            self.held.difference_update(buckets)

    def leave(self) -> None:
        with self._lock:
            if self._schema and self._connection is not None and not self._connection.invalidated:
                self._connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")
            self._schema = ""
            self.held.clear()

    def _connected(self) -> Connection:
        """The session that holds the locks; a new session begins without locks.

        Raises the errors of connecting, and InvalidRequest for a pooler that gives each transaction another session.
        """
        if self._closed:
            # A stopped relay leaves a thread behind for a moment, which must not begin another session.
            raise Unavailable("this relay has stopped")
        if self._connection is not None and not self._connection.closed and not self._connection.invalidated:
            return self._connection
        self._schema = ""
        self.held.clear()
        if pool_mode(self._engine) == TRANSACTION:
            raise InvalidRequest(REMEDY)
        self._connection = self._engine.connect()
        at_level(self._connection, "AUTOCOMMIT")
        self._connection.exec_driver_sql(
            set_in_session(
                KEEPALIVE
                | {
                    "lock_timeout": round(1000 * min(LOOK_LOCK_SECONDS, LOCK_SECONDS)),
                    "statement_timeout": 0,
                }
            )
        )
        # PostgreSQL before version 14 does not have this setting: there a lease ends only with the connection.
        self._connection.exec_driver_sql(
            f"SELECT set_config(name, '{round(1000 * self._seconds)}', false) FROM pg_settings "
            "WHERE name = 'idle_session_timeout'"
        )
        try:
            self._connection.exec_driver_sql(f"LISTEN {WAKE_CHANNEL}")
        except sa.exc.DBAPIError as error:
            if not is_read_only(error.orig):
                raise
            self._end_session()
            raise Unavailable(
                "this PostgreSQL is a standby, where a relay can mark nothing as sent: name the primary; a --dsn with "
                "several hosts finds it with target_session_attrs=primary"
            ) from error
        return self._connection

    def limit(self, connection: Connection) -> None:
        # With a bound for locks, a relay can log that it waits for one, and can be stopped. A statement has none: the
        # page of a huge table would be cancelled each time. The first statement of a transaction still has the role's
        # own bound.
        connection.exec_driver_sql(
            f"SELECT set_config('idle_in_transaction_session_timeout', '{round(1000 * self._seconds)}', true), "
            f"set_config('lock_timeout', '{round(1000 * _lock_seconds(self._seconds, self._among_many))}', true), "
            "set_config('statement_timeout', '0', true)"
        )

    def all(self) -> bool:
        return len(self.held) == BUCKETS

    def condition(self, table: sa.Table) -> Any:
        if len(self.held) == BUCKETS:
            return sa.true()
        hashed = sa.func.hashtext(sa.func.coalesce(table.c.key, table.c.transaction_id))
        return hashed.op("&")(BUCKETS - 1).in_(sorted(self.held))

    def read(self, function: Callable[[Connection], T]) -> T:
        with self._lock:
            return function(self._connected())

    def wait(self, seconds: float, schemas: Container[str]) -> set[str]:
        now = self._monotonic()
        until, silent_until = now + seconds, now + self._seconds / 2
        while not self._stopping and (now := self._monotonic()) < until:
            if now >= silent_until:
                with self._lock:
                    self._connected().exec_driver_sql("SELECT 1")  # keeps the session from being silent for too long
                silent_until = now + self._seconds / 2
            named = self._named(min(until, silent_until) - now)
            if ours := {schema for schema in named if not schema or schema in schemas}:
                return ours
        return set()

    def arrived(self) -> set[str]:
        return self._named(0.0)

    def _named(self, seconds: float) -> set[str]:
        """All schemas that notifications name, as soon as there are any, at most after `seconds`.

        Raises Unavailable if the session has ended.
        """
        with self._lock:
            connection = self._connected()
        driver: Any = connection.connection.driver_connection
        until = time.monotonic() + seconds
        named: set[str] = set()
        try:
            while True:
                remaining = max(0.0, min(until - time.monotonic(), STOP_SECONDS))
                # The driver keeps notifications that came with the answers of other statements: take all of them.
                for notification in driver.notifies(timeout=remaining, stop_after=1):
                    named.add(str(notification.payload))
                if named:
                    named.update(str(notification.payload) for notification in driver.notifies(timeout=0.0))
                    return named
                if self._stopping or time.monotonic() >= until:
                    return named
        except connection.dialect.loaded_dbapi.Error as error:  # the driver's error, since SQLAlchemy is not involved
            connection.invalidate(error)
            raise Unavailable(f"the database ended the session that waits for new rows: {error}") from error

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
        self._schema = ""
        self.held.clear()
