"""One database: its engine, the threads for its calls, and retries after deadlocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.errors import Unavailable
from notify.storage.sql.dialect import Again, Dialect, Duplicate, Gone, invalid_value, is_a_values_fault
from notify.storage.sql.engines import open_engine
from notify.storage.sql.mysql import MySql
from notify.storage.sql.postgresql import PostgreSql
from notify.storage.sql.sqlite import Sqlite

READERS = 4
ATTEMPTS = 5

T = TypeVar("T")


class Database:
    """`shard` is its name among several."""

    def __init__(self, url: str, shard: str) -> None:
        """Raises InvalidRequest for a bad URL."""
        self.shard = shard
        self.engine = open_engine(url)
        self.dialect = dialect_of(self.engine)
        self._pool = ThreadPoolExecutor(READERS, f"notify-sql-read-{shard}")

    def close(self) -> None:
        """Wait for running calls, then end the threads and close the connections."""
        self._pool.shutdown(wait=True)
        self.engine.dispose()

    async def in_thread(self, function: Callable[[], T]) -> T:
        """The result of a function that runs in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def run(self, function: Callable[[Connection], T]) -> T:
        """The result of a function that runs in a transaction of its own, repeated after deadlocks.

        Raises Unavailable, and InvalidRequest for a value that the database cannot hold.
        """
        return await self.in_thread(lambda: self._with_connection(function))

    def _with_connection(self, function: Callable[[Connection], T]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                with self.engine.begin() as connection:
                    return function(connection)
            except sa.exc.DBAPIError as error:
                cause = self.dialect.error(error.orig or error)
                if is_a_values_fault(cause):
                    raise invalid_value(cause) from None
                again = isinstance(cause, Again | Duplicate) or (isinstance(cause, Gone) and not attempt)
                if attempt + 1 == ATTEMPTS or not again:
                    does = "does not answer" if isinstance(cause, Gone) else "refuses it"
                    raise Unavailable(f"shard {self.shard!r}: the database {does} ({error.orig})") from None
        raise AssertionError("the loop returns or raises")


def dialect_of(engine: Engine) -> Dialect:
    if engine.dialect.name == "postgresql":
        return PostgreSql(engine)
    return Sqlite(engine) if engine.dialect.name == "sqlite" else MySql(engine)
