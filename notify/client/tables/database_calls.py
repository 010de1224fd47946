"""DatabaseCalls: the calls of background work to a service's database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from notify.check.local import is_async
from notify.check.question import in_own_transaction, short_lock_waits
from notify.check.sources import Sources
from notify.client.tables.background_connections import POOL_SECONDS, BackgroundConnections
from notify.runtime.databases import allow_writes, drop_if_gone, is_read_only, without_server_cursors
from notify.runtime.schemas import naming

T = TypeVar("T")
CLOSE_SECONDS = 8.0
LOCK_SECONDS = 5.0
"""How long a call waits for rows and tables that others have locked, such as a migration."""


class DatabaseCalls:
    """Calls with an Engine, in threads, or with an AsyncEngine, one at a time. Belongs to one event loop."""

    def __init__(
        self,
        engine: Any,
        sources: Sources | None = None,
        lock_seconds: float = LOCK_SECONDS,
        pool_seconds: float = POOL_SECONDS,
    ) -> None:
        """`sources`: which `look` finds; None: the caller knows the schemas."""
        self._connections = BackgroundConnections(engine, pool_seconds)
        self._is_async = is_async(engine)
        self._lock_ms = round(1000 * lock_seconds)
        self._sources = sources
        self._current_call: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[..., T], *arguments: Any, schema: str) -> T:
        """Call `function(connection, *arguments)` in a new transaction, in a schema, and return the result."""
        return await self._run(_call, schema, self._lock_ms, function, *arguments)

    async def look(self) -> None:
        """Look for the schemas with Notify's tables."""
        if self._sources is None:
            return
        await self._run(self._sources.look)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function(connection, *arguments)`. If the caller is cancelled, the call still runs to its end: a
        connection that is interrupted within a statement would be lost to its pool."""
        if self._is_async:
            call: Coroutine[Any, Any, T] = self._on_loop(function, *arguments)
        else:
            call = asyncio.to_thread(self._in_thread, function, *arguments)
        self._current_call = asyncio.ensure_future(call)
        self._current_call.add_done_callback(_retrieve)
        result: T = await asyncio.shield(self._current_call)
        return result

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._connections.one() as connection:
            return function(connection, *arguments)

    async def _on_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        async with self._connections.one_async() as connection:
            return await connection.run_sync(function, *arguments)

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


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved: otherwise asyncio reports it if the caller was cancelled."""
    if not done.cancelled():
        done.exception()
