"""BackgroundConnections: connections of a service's engine for work in the background, such as answers to checks.

They come from the engine's pool. It may give none for long, because the service's own transactions have them all; or
for ever: if an exception of a signal handler interrupts the main thread while it holds the pool's lock, the lock stays
taken. The main thread continues, because the lock is re-entrant, and every other thread waits. So the pool is asked by
a separate thread. If it gives nothing in time, the work has a connection of its own, made as the pool makes them and
closed after its use (docs/adr/0066).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.pool import Pool, QueuePool

from notify.client.threads.forks import no_fork
from notify.runtime.green import start_thread
from notify.runtime.program_log import program_log

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

log = program_log("notify.client")

POOL_SECONDS = 2.0
"""How long work in the background waits for the pool, before it makes a connection of its own."""
OWN = 2
"""The most connections of one's own at a time."""

_initialized: weakref.WeakSet[Any] = weakref.WeakSet()
"""The dialects of engines that have given a connection. With its first one SQLAlchemy asks what the server is, while
other threads wait at the same pool; those at another pool would not."""


def note_connected(connection: Connection) -> None:
    """Note that the engine of a connection has given one."""
    _initialized.add(connection.dialect)


class BackgroundConnections:
    """The connections of one Engine or AsyncEngine. With an Engine, any thread may use them; with an AsyncEngine, the
    coroutines of its event loop."""

    def __init__(
        self, engine: Any, pool_seconds: float = POOL_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`pool_seconds`: how long to wait for the pool."""
        self._engine = engine
        self._seconds = pool_seconds
        self._monotonic = monotonic
        self._late_since = 0.0
        self._turns = threading.BoundedSemaphore(OWN)
        self._turns_async = asyncio.Semaphore(OWN)
        self._late: _Loan | _AsyncLoan | None = None
        """One that the pool has not ended in time; until it does, nobody else asks that pool."""
        self._logged = ""

    # --- threads ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def one(self) -> Iterator[Connection]:
        """A connection for this context, within which no fork happens. Raises what `engine.connect()` raises."""
        engine: Engine = self._engine
        loan = None
        if not _may_keep_waiting(engine):
            yield from self._direct(engine)
        elif self._is_late(engine.pool) or (loan := self._borrowed(engine)) is None:
            yield from self._own(engine)
        else:
            yield from self._lent(loan)

    def _direct(self, engine: Engine) -> Iterator[Connection]:
        with no_fork(), engine.connect() as connection:
            note_connected(connection)
            yield connection

    def _borrowed(self, engine: Engine) -> _Loan | None:
        """A loan with its connection; None if the pool gives none in time. Raises its error."""
        loan = _Loan(engine)
        if not loan.has_come.wait(self._seconds):
            loan.give_back()
            self._note_late(loan)
            return None
        if loan.error is not None:
            raise loan.error
        return loan

    def _lent(self, loan: _Loan) -> Iterator[Connection]:
        assert loan.connection is not None
        try:
            with no_fork():
                yield loan.connection
        finally:
            loan.give_back()
            if not loan.has_ended.wait(self._seconds):
                self._note_late(loan)

    def _own(self, engine: Engine) -> Iterator[Connection]:
        self._log_late()
        if not self._turns.acquire(timeout=self._seconds):
            raise _all_in_use()
        try:
            own = _OwnEngine(engine)
            try:
                with no_fork(), own.connect() as connection:
                    self._log_stuck(engine.pool)
                    yield connection
            finally:
                own.pool.dispose()
        finally:
            self._turns.release()

    # --- coroutines -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def one_async(self) -> AsyncIterator[AsyncConnection]:
        """As `one`, for an AsyncEngine."""
        from sqlalchemy.ext.asyncio import AsyncEngine

        engine: AsyncEngine = self._engine
        if not _may_keep_waiting(engine.sync_engine):
            async with engine.connect() as connection:
                _initialized.add(engine.sync_engine.dialect)
                yield connection
            return
        if not self._is_late(engine.sync_engine.pool):
            loan = _AsyncLoan(engine)
            if await loan.has_come(self._seconds):
                connection = loan.starting.result()
                try:
                    yield connection
                finally:
                    await asyncio.shield(asyncio.ensure_future(connection.close()))
                return
            self._note_late(loan)
        self._log_late()
        async with self._turns_async:
            own = AsyncEngine(_OwnEngine(engine.sync_engine))
            async with own.connect() as connection:
                try:
                    self._log_stuck(engine.sync_engine.pool)
                    yield connection
                finally:
                    await connection.run_sync(_close)

    # --- a pool that gives nothing ----------------------------------------------------------------------------

    def _note_late(self, loan: _Loan | _AsyncLoan) -> None:
        if not self._is_late(loan.pool):
            self._late, self._late_since, self._logged = loan, self._monotonic(), ""

    def _is_late(self, pool: Pool) -> bool:
        late = self._late
        return late is not None and late.pool is pool and not late.is_over()

    def _log_late(self) -> None:
        if not self._logged:
            self._logged = "late"
            log.warning(
                "the engine's pool has given no connection for %g s, so answers to checks and other work in the "
                "background make connections of their own, %d at most: give the engine a larger pool_size, if the "
                "service's own transactions have all of its connections",
                self._seconds, OWN,
            )  # fmt: skip

    def _log_stuck(self, pool: Pool) -> None:
        """Say that a pool gives nothing any more, once it should have raised, and the database does answer."""
        if self._logged == "stuck" or not isinstance(pool, QueuePool) or not self._is_late(pool):
            return
        seconds = self._monotonic() - self._late_since
        if seconds > pool.timeout() + 2 * self._seconds:
            self._logged = "stuck"
            log.error(
                "the engine's pool has given no connection for %.0f s, nor its error after pool_timeout: an exception "
                "of a signal handler, such as a time limit of a task, has probably interrupted it while it held its "
                "lock, which no other thread gets any more: restart this process, or call "
                "engine.dispose(close=False); let no signal handler raise while the service uses its database",
                seconds,
            )  # fmt: skip


def _may_keep_waiting(engine: Engine) -> bool:
    """Whether the pool has connections that others use, and locks; and another pool may be made like it."""
    return isinstance(engine.pool, QueuePool) and engine.dialect in _initialized


def _all_in_use() -> sa.exc.TimeoutError:
    return sa.exc.TimeoutError(f"the engine's pool gives no connection, and {OWN} others are in use already")


def _close(connection: Connection) -> None:
    """Close a connection of an `_OwnEngine` to the database, too."""
    connection.close()
    connection.engine.pool.dispose()


class _OwnEngine(OptionEngine):
    """A service's engine, with its options and listeners, and with a pool of its own."""

    pool: Pool = None  # type: ignore[assignment]  # in the place of a property, which is the service's pool

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, {})
        self.pool = engine.pool.recreate()


class _Loan:
    """A connection that a thread gets from a pool, and returns to it: both may take for ever."""

    def __init__(self, engine: Engine) -> None:
        """Raises RuntimeError if the system allows no more threads."""
        self.pool = engine.pool
        self.connection: Connection | None = None
        self.error: BaseException | None = None
        self.has_come, self._is_given_back, self.has_ended = threading.Event(), threading.Event(), threading.Event()
        self._engine = engine
        start_thread(self._run, "notify-connection")

    def _run(self) -> None:
        try:
            with no_fork():
                self.connection = self._engine.connect()
            self.has_come.set()
            self._is_given_back.wait()
            with no_fork():
                self.connection.close()
        except BaseException as error:
            self.error = error
        finally:
            self.has_come.set()
            self.has_ended.set()

    def give_back(self) -> None:
        """Let the thread return the connection, or do so as soon as it has come."""
        self._is_given_back.set()

    def is_over(self) -> bool:
        return self.has_ended.is_set()


class _AsyncLoan:
    """A connection that a task gets from the pool of an AsyncEngine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.pool = engine.sync_engine.pool
        self.starting: asyncio.Future[AsyncConnection] = asyncio.ensure_future(_started(engine))

    async def has_come(self, seconds: float) -> bool:
        """Whether the connection comes in time. If not, it is closed when it comes. Raises its error."""
        try:
            await asyncio.wait([self.starting], timeout=seconds)
        except asyncio.CancelledError:
            self.starting.cancel()
            self.starting.add_done_callback(_return_late)
            raise
        if self.starting.done():
            self.starting.result()
            return True
        self.starting.add_done_callback(_return_late)
        return False

    def is_over(self) -> bool:
        return self.starting.done()


async def _started(engine: AsyncEngine) -> AsyncConnection:
    return await engine.connect()


_returning: set[asyncio.Future[None]] = set()
"""The loop itself keeps only weak references to its tasks."""


def _return_late(starting: asyncio.Future[AsyncConnection]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        returning = asyncio.ensure_future(starting.result().close())
        _returning.add(returning)
        returning.add_done_callback(_returning.discard)
