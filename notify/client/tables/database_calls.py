"""DatabaseCalls: the calls of background work to a service's database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from notify.check.question import in_own_transaction, short_lock_waits
from notify.check.sources import Sources
from notify.client.threads.forks import no_fork
from notify.runtime.databases import allow_writes, drop_if_gone, is_read_only, without_server_cursors
from notify.runtime.schemas import naming

T = TypeVar("T")
CLOSE_SECONDS = 8.0
LOCK_SECONDS = 5.0
"""How long a call waits for rows and tables that others have locked, such as a migration."""


class DatabaseCalls:
    """Calls with an Engine, in threads, or with an AsyncEngine, one at a time. Belongs to one event loop."""

    def __init__(self, engine: Any, sources: Sources | None = None, lock_seconds: float = LOCK_SECONDS) -> None:
        """`sources`: which `look` finds; None: the caller knows the schemas."""
        self._engine = engine
        self._lock_ms = round(1000 * lock_seconds)
        self._sources = sources
        self._current_call: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[..., T], *arguments: Any, schema: str) -> T:
        """Call `function(connection, *arguments)` in a new transaction, in a schema, and return the result."""
        if hasattr(self._engine, "sync_engine"):
            call: Coroutine[Any, Any, T] = _call_async(self._engine, schema, self._lock_ms, function, *arguments)
        else:
            call = asyncio.to_thread(_without_fork, self._engine, schema, self._lock_ms, function, *arguments)
        return await self._to_its_end(call)

    async def look(self) -> None:
        """Look for the schemas with Notify's tables."""
        if self._sources is None:
            return
        if hasattr(self._engine, "sync_engine"):
            await self._to_its_end(_look_async(self._engine, self._sources))
        else:
            await self._to_its_end(asyncio.to_thread(_look, self._engine, self._sources))

    async def _to_its_end(self, call: Coroutine[Any, Any, T]) -> T:
        """If the caller is cancelled, the call still runs to its end: a connection that is interrupted within a
        statement would be lost to its pool."""
        self._current_call = asyncio.ensure_future(call)
        self._current_call.add_done_callback(_retrieve)
        result: T = await asyncio.shield(self._current_call)
        return result

    async def close(self) -> None:
        """Wait at most CLOSE_SECONDS for a call; its caller is cancelled already."""
        if self._current_call is not None and not self._current_call.done():
            await asyncio.wait([self._current_call], timeout=CLOSE_SECONDS)


def _call(connection: Connection, schema: str, lock_ms: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call in a transaction that may write, also where transactions only read unless they say otherwise
    (`default_transaction_read_only`; a standby refuses that, too). On MySQL and MariaDB at a level of its own: that of
    the service may show rows that are not committed yet, and they would be sent."""

    def called() -> T:
        with short_lock_waits(connection, lock_ms):
            return function(connection, *arguments)

    with without_server_cursors(connection), naming(connection, schema):
        if connection.dialect.name in ("mysql", "mariadb"):
            return in_own_transaction(connection, called)
        try:
            with connection.begin():
                return called()
        except DBAPIError as error:
            if not is_read_only(error.orig):
                drop_if_gone(connection, error.orig)
                raise
        with connection.begin():
            allow_writes(connection)
            return called()


async def _call_async(engine: Any, schema: str, lock_ms: int, function: Callable[..., T], *arguments: Any) -> T:
    async with engine.connect() as connection:
        result: T = await connection.run_sync(_call, schema, lock_ms, function, *arguments)
        return result


def _look(engine: Engine, sources: Sources) -> None:
    with no_fork(), engine.connect() as connection:
        sources.look(connection)


async def _look_async(engine: Any, sources: Sources) -> None:
    async with engine.connect() as connection:
        await connection.run_sync(sources.look)


def _without_fork(engine: Engine, schema: str, lock_ms: int, function: Callable[..., T], *arguments: Any) -> T:
    with no_fork(), engine.connect() as connection:
        return _call(connection, schema, lock_ms, function, *arguments)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved: otherwise asyncio reports it if the caller was cancelled."""
    if not done.cancelled():
        done.exception()
