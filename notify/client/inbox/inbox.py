"""Inbox: commits a handler's effect together with a row that records it, so that a redelivery has no second effect."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.orm import Session, SessionTransaction

from notify.check.local import is_async as is_async_engine
from notify.check.question import in_own_transaction
from notify.client.handling.handlers import call_to_the_end, refuse_unfinished
from notify.client.inbox.rows import Guard, check_transactions, claim, claim_all, has_ended, is_claimed, refuse_partial
from notify.client.tables.definitions import CLAIMS, MAKE_TABLES, PURGES_INBOX, has_replay, notify_inbox, notify_source
from notify.client.tables.old_rows import CLOCK_SKEW, DAY, instant_before, note_purged
from notify.errors import InboxUnavailable, InvalidRequest
from notify.protocol.limits import check_whole
from notify.protocol.message import ReceivedMessage, number_of_seconds
from notify.runtime.databases import (
    check_engine,
    drop_if_gone,
    has_table,
    is_away,
    reason_of,
    roll_back_driver,
    without_server_cursors,
)
from notify.runtime.guarantees import verify, verify_once
from notify.runtime.schemas import by_key, found_in, named_by, naming

T = TypeVar("T")
PURGE_AFTER_SECONDS = 30 * DAY
"""Longer than a server's retention of 7 days; older messages are delivered again only if an operator forces it."""
MOST_PURGED = 10_000
"""The most rows that a transaction of a purge deletes."""
MAY_COMMIT, FAILED = "notify_inbox_may_commit", "notify_inbox_failed"
Finish = Callable[[Guard | None], None]
TURN_SECONDS = 60.0
"""How long a handler waits for its turn at SQLite's one writer; then SQLite's own lock decides."""


class Turns:
    """The turns at the one writer of an SQLite database: its lock, for which handlers would fight, is not fair, and
    fails those that wait for long. With another database everybody's turn is at once."""

    def __init__(self, engine: Any) -> None:
        self._is_needed = engine.dialect.name == "sqlite"
        self._lock = threading.Lock()
        self._async_lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The turn of a thread."""
        is_taken = self._is_needed and self._lock.acquire(timeout=TURN_SECONDS)
        try:
            yield
        finally:
            if is_taken:
                self._lock.release()

    @contextlib.asynccontextmanager
    async def turn_async(self) -> AsyncIterator[None]:
        """The turn of a coroutine."""
        if not self._is_needed:
            yield
            return
        loop = asyncio.get_running_loop()
        if self._async_lock is None or self._loop is not loop:  # a lock belongs to one event loop
            self._async_lock, self._loop = asyncio.Lock(), loop
        lock, is_taken = self._async_lock, False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_SECONDS):
                is_taken = await lock.acquire()
        try:
            yield
        finally:
            if is_taken:
                lock.release()


_turns: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
"""The turns at the database of each engine, which several inboxes may share."""


def turns_of(engine: Any) -> Turns:
    """The turns at an engine's database."""
    sync_engine = getattr(engine, "sync_engine", engine)
    return _turns.setdefault(sync_engine, Turns(sync_engine))


class InboxSession(Session):
    """The session that a handler gets. Only the inbox commits it, once the handler has returned."""


@event.listens_for(InboxSession, "before_commit")
def _refuse_commit(session: Session) -> None:
    # The event also fires when a savepoint is released; the savepoint is the session's current transaction then.
    if not (session.info.get(MAY_COMMIT) or session.in_nested_transaction()):
        raise _must_not_commit()


_guarded: weakref.WeakKeyDictionary[sa.Connection, Session] = weakref.WeakKeyDictionary()
"""The session of each connection that a handler cannot commit itself."""


def _connection_of(session: Session) -> sa.Connection:
    """The session's connection, guarded so that a handler cannot commit the connection itself."""
    connection = session.connection()
    _guarded[connection] = session
    return connection


def _refuse_connection(connection: sa.Connection) -> None:
    session = _guarded.get(connection)
    if session is not None and not session.info.get(MAY_COMMIT):
        roll_back_driver(connection)
        raise _must_not_commit()


def _note_failure(context: ExceptionContext) -> None:
    session = None if context.connection is None else _guarded.get(context.connection)
    if session is not None and session.info.get(MAY_COMMIT):
        session.info[FAILED] = context.original_exception


def _check_committed(session: Session) -> None:
    """Raises InvalidRequest if a listener to the commit has passed over an error, with which PostgreSQL rolls back
    instead, without an error. If the effect is committed, so is its claim, which the next delivery finds."""
    if (failed := session.info.get(FAILED)) is not None:
        raise InvalidRequest(
            f"a statement failed while the inbox committed, so that the effect may be lost: {failed}", "inbox_commit"
        )


def guard_connections(engine: Any) -> None:
    """Listen to the commits of an engine: to make a listener for each connection would cost as much as a statement."""
    sync_engine = getattr(engine, "sync_engine", engine)
    if not event.contains(sync_engine, "commit", _refuse_connection):
        # Before a producer's, which would store halves of messages.
        event.listen(sync_engine, "commit", _refuse_connection, insert=True)
        event.listen(sync_engine, "handle_error", _note_failure)


def _must_not_commit() -> InvalidRequest:
    return InvalidRequest(
        "a handler must not commit the inbox's session: the message would count as handled although the handler "
        "may still fail; flush() writes, begin_nested() is a part that may fail alone",
        "inbox_commit",
    )


class Inbox:
    """Makes effects happen exactly once in the database of `engine` (an Engine; an AsyncEngine for AsyncConsumer).

    Keep rows (see `purge`) longer than messages can be delivered again, and for the time that an audit should cover.
    """

    gives_session: ClassVar[bool] = True
    """Whether handlers get a session with the message."""
    make_tables: ClassVar[str] = MAKE_TABLES
    """The part of an error text that says how to create Notify's tables."""

    def __init__(
        self, engine: Any, *, schema: str | None = None, purge_after: float | None = PURGE_AFTER_SECONDS
    ) -> None:
        """`schema`: the schema (on MySQL and MariaDB the database) of the tables; None: where the engine finds them
        when the consumer starts. It stays the same, whatever a handler or a pool makes of a session's search_path.

        `purge_after` (seconds, at least a day): consumers of a queue server delete older rows; None: the rows stay.

        Consumers of Kafka delete no rows: see `purge`.
        """
        check_engine(engine, is_async=False)
        if purge_after is not None:
            _check_age("purge_after", purge_after)
        self.engine = engine
        self.purge_after = purge_after
        self._turns = turns_of(engine)
        if self.gives_session:
            guard_connections(engine)
        self._place = schema or ""
        """The schema of the tables; "" until it is found."""

    def is_away(self, error: BaseException) -> bool:
        """Whether an error says that the inbox's database does not answer now."""
        return is_away(error)

    def check(self) -> None:
        """Raises InvalidRequest if an inbox cannot work in its database: missing tables, or SQLite's transactions."""
        self.call(check, self.make_tables)

    async def check_async(self) -> None:
        """`check` for an AsyncEngine."""
        await self.call_async(check, self.make_tables)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function(connection, *arguments)` in a new transaction, whose statements name the inbox's schema, and
        return the result."""
        with self._turns.turn(), self.engine.connect() as connection:
            result: T = self._called(connection, function, *arguments)
        return result

    async def call_async(self, function: Callable[..., T], *arguments: Any) -> T:
        """`call` for an AsyncEngine."""
        async with self._turns.turn_async(), self.engine.connect() as connection:
            result: T = await connection.run_sync(self._called, function, *arguments)
        return result

    def _called(self, connection: sa.Connection, function: Callable[..., T], *arguments: Any) -> T:
        if connection.dialect.name in ("mysql", "mariadb"):
            result: T = in_own_transaction(connection, self._named, connection, function, *arguments)
            return result
        with connection.begin():
            return self._named(connection, function, *arguments)

    def _named(self, connection: sa.Connection, function: Callable[..., T], *arguments: Any) -> T:
        try:
            with without_server_cursors(connection), naming(connection, self.place(connection)):
                return function(connection, *arguments)
        except sa.exc.DBAPIError as error:
            drop_if_gone(connection, error.orig)
            raise

    def place(self, connection: sa.Connection) -> str:
        """The schema of the tables, which the first call finds; "" if there are none yet."""
        if not self._place:
            self._place = found_in(connection, notify_inbox.name)
        return self._place

    def run(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> bool:
        """Call `handler(message, session)` and commit its effect; False if the message took effect before.

        An exception of the handler rolls back the effect and the inbox row, and is raised here. Raises InvalidRequest
        if the handler ends the session's transaction itself, or returns a coroutine instead of doing its work, and
        InboxUnavailable if the database did not answer before the handler was called.
        """
        return bool(self._run(group, (message,), lambda fresh, *session: handler(fresh[0], *session)))

    def run_batch(self, group: str, messages: Sequence[ReceivedMessage], handler: Callable[..., Any]) -> int:
        """Call `handler(messages, session)` with the messages that had no effect before, commit, and return how many.

        All is one transaction: an exception of the handler rolls back the claims and effects of all messages, and is
        raised here. The handler is not called without messages. Raises InvalidRequest like `run`.
        """
        return len(self._run(group, messages, handler))

    def _run(
        self, group: str, messages: Sequence[ReceivedMessage], handle: Callable[..., Any]
    ) -> list[ReceivedMessage]:
        """Call `handle(fresh, session)` and commit; returns `fresh`, the messages that had no effect before."""
        guard: Guard | None = None
        fresh: list[ReceivedMessage] = []
        try:
            with self._turns.turn(), self._transaction() as (connection, session, finish):
                fresh = self._claimed(group, messages, connection)
                if not fresh:
                    finish(None)
                    return fresh
                with Guard(connection) as guard:
                    call_to_the_end(handle, fresh, *session)
                    finish(guard)
        except BaseException as error:
            if guard is None and self.is_away(error):
                raise _unavailable(error) from error
            if isinstance(error, InboxUnavailable):
                error.is_of_handler = True
            if guard is not None and guard.is_lost:
                refuse_partial(self.call(is_claimed, group, fresh), error)
            raise
        return fresh

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[tuple[sa.Connection, tuple[Any, ...], Finish]]:
        """A transaction that commits at the end of the block: its connection, what handlers get in addition to the
        messages, and the function that completes the effect."""
        with InboxSession(self.engine) as session, session.begin() as transaction:
            yield _connection_of(session), (session,), functools.partial(_finish, session, transaction)
        _check_committed(session)

    def _claimed(
        self, group: str, messages: Sequence[ReceivedMessage], connection: sa.Connection
    ) -> list[ReceivedMessage]:
        """The messages that had no effect before, and are claimed now."""
        try:
            with without_server_cursors(connection):
                place = self.place(connection)
                if len(messages) == 1:  # takes a statement less if the message had its effect
                    return list(messages) if claim(connection, group, messages[0], place) else []
                return claim_all(connection, group, messages, place)
        except sa.exc.DBAPIError as error:
            drop_if_gone(connection, error.orig)
            raise

    def purge(self, older_than: float, *, batch: int = MOST_PURGED) -> int:
        """Delete rows older than `older_than` seconds, in transactions of `batch` rows; returns their number.

        The database notes that rows of this age may be gone, so that an audit does not report their effects as missing.
        Raises InvalidRequest for less than a day, because a message may be redelivered as long as its topic retains it,
        and for an AsyncEngine (see `purge_async`).
        """
        if is_async_engine(self.engine):
            raise InvalidRequest("this inbox has an AsyncEngine: write `await inbox.purge_async(…)`", "invalid_engine")
        _check_purge(older_than, batch)
        cutoff = self.call(_note_cutoff, older_than)
        total = 0
        while (rows := self.call(_delete_before, cutoff, batch)) == batch:
            total += rows
        return total + rows

    async def purge_async(self, older_than: float, *, batch: int = MOST_PURGED) -> int:
        """`purge` for an AsyncEngine."""
        _check_purge(older_than, batch)
        cutoff = await self.call_async(_note_cutoff, older_than)
        total = 0
        while (rows := await self.call_async(_delete_before, cutoff, batch)) == batch:
            total += rows
        return total + rows

    async def run_async(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> bool:
        """`run` for a coroutine function and an AsyncSession."""
        return bool(await self._run_async(group, (message,), lambda fresh, session: handler(fresh[0], session)))

    async def run_batch_async(
        self, group: str, messages: Sequence[ReceivedMessage], handler: Callable[..., Any]
    ) -> int:
        """`run_batch` for a coroutine function and an AsyncSession."""
        return len(await self._run_async(group, messages, handler))

    async def _run_async(
        self, group: str, messages: Sequence[ReceivedMessage], handle: Callable[..., Any]
    ) -> list[ReceivedMessage]:
        """`_run` for a coroutine function.

        All before the handler is one call of synchronous code, and all behind it another: each of these calls costs a
        greenlet.
        """
        guard: Guard | None = None
        fresh: list[ReceivedMessage] = []
        try:
            async with self._turns.turn_async():
                session = _session(self.engine)
                transaction = session.sync_session.begin().__enter__()
                try:
                    claimed = functools.partial(self._claimed, group, messages)
                    fresh, guard = await session.run_sync(_begin, transaction, claimed)
                    if guard is not None:
                        await _to_the_end(guard, session, transaction, handle(fresh, session))
                except BaseException as error:
                    async with session:
                        await session.run_sync(_give_up, transaction, error)
                    raise
        except BaseException as error:
            if guard is None and self.is_away(error):
                raise _unavailable(error) from error
            if isinstance(error, InboxUnavailable):
                error.is_of_handler = True
            if guard is not None and guard.is_lost:
                refuse_partial(await self.call_async(is_claimed, group, fresh), error)
            raise
        return fresh


def _unavailable(error: BaseException) -> InboxUnavailable:
    return InboxUnavailable(f"the inbox cannot use its database now: {reason_of(error)}")


def _session(engine: Any) -> Any:
    """An AsyncSession for a handler."""
    from sqlalchemy.ext.asyncio import AsyncSession

    return AsyncSession(engine, sync_session_class=InboxSession)


def _begin(
    session: Session, transaction: SessionTransaction, claimed: Callable[[sa.Connection], list[ReceivedMessage]]
) -> tuple[list[ReceivedMessage], Guard | None]:
    """Claim messages; if none is claimed, commit."""
    connection = _connection_of(session)
    if fresh := claimed(connection):
        return fresh, Guard(connection)
    _finish(session, transaction, None)
    _commit(session, transaction)
    return fresh, None


def _commit(session: Session, transaction: SessionTransaction) -> None:
    transaction.__exit__(None, None, None)
    session.close()
    _check_committed(session)


def _give_up(session: Session, transaction: SessionTransaction, error: BaseException) -> None:
    transaction.__exit__(type(error), error, error.__traceback__)


async def _to_the_end(guard: Guard, session: Any, transaction: SessionTransaction, work: Awaitable[object]) -> None:
    """Await a handler's coroutine and commit; does for a coroutine what `with guard` does for a plain handler."""

    def end(session: Session) -> None:
        _finish(session, transaction, guard)
        _commit(session, transaction)

    try:
        refuse_unfinished(await work)
        await session.run_sync(end)
    except asyncio.CancelledError:
        raise
    except BaseException:
        await session.run_sync(lambda _: guard.look())
        raise


def _finish(session: Session, transaction: SessionTransaction, guard: Guard | None) -> None:
    """Complete the effect, up to the commit; `guard`: None if no handler was called. Raises InvalidRequest if the
    session's transaction, which contains the claim, has ended, or would not commit the whole effect."""
    if session.get_transaction() is not transaction or not transaction.is_active:
        raise has_ended()
    session.info[MAY_COMMIT] = True
    if guard is None:
        return
    while (nested := session.get_nested_transaction()) is not None:
        nested.commit()  # a savepoint that the handler has left open
    session.flush()
    guard.release()


def whole_from(connection: sa.Connection) -> datetime:
    """The time since which each message that took effect has an inbox row; 1970 if nothing was ever purged."""
    purged_ms = connection.execute(sa.select(notify_source.c.inbox_from)).scalar() or 0
    purged_until = datetime.fromtimestamp(purged_ms / 1000, UTC)
    return purged_until + CLOCK_SKEW if purged_ms else purged_until


def note_old(connection: sa.Connection, older_than: float) -> bool:
    """Note that rows older than `older_than` seconds may be gone; False if there are no such rows."""
    verify_once(connection, PURGES_INBOX)
    created_at = notify_inbox.c.created_at
    cutoff = instant_before(connection, older_than)
    if connection.execute(sa.select(created_at).where(created_at < cutoff).limit(1)).first() is None:
        return False
    note_purged(connection, notify_source.c.inbox_from, cutoff)
    return True


def delete_noted(connection: sa.Connection, batch: int) -> int:
    """Delete rows older than the noted instant, at most `batch`; returns their number."""
    noted_ms = connection.execute(sa.select(notify_source.c.inbox_from)).scalar() or 0
    cutoff = datetime.fromtimestamp(noted_ms / 1000, UTC).replace(tzinfo=None)
    return _delete_before(connection, cutoff, batch)


def _note_cutoff(connection: sa.Connection, older_than: float) -> datetime:
    """Note that rows older than `older_than` seconds may be gone; returns the instant before which they are deleted."""
    verify_once(connection, PURGES_INBOX)
    cutoff = instant_before(connection, older_than)
    note_purged(connection, notify_source.c.inbox_from, cutoff)
    return cutoff


def _delete_before(connection: sa.Connection, cutoff: datetime, batch: int) -> int:
    columns = notify_inbox.c
    keys = sa.select(columns.consumer_group, columns.message_id, columns.replay)
    rows = connection.execute(keys.where(columns.created_at < cutoff).limit(batch)).all()
    ids_by_group: dict[tuple[str, int], list[str]] = {}
    for group, message_id, replay in rows:
        ids_by_group.setdefault((group, replay), []).append(message_id)
    for (group, replay), ids in ids_by_group.items():
        condition = sa.and_(columns.consumer_group == group, columns.replay == replay, columns.message_id.in_(ids))
        connection.execute(by_key(notify_inbox.delete().where(condition), notify_inbox))
    return len(rows)


def _check_age(name: str, seconds: float) -> None:
    if not number_of_seconds(name, seconds) >= DAY:
        raise InvalidRequest(
            f"{name} is at least {DAY:g} s: a message that comes again would take effect again", "out_of_bounds"
        )


def _check_purge(older_than: float, batch: int) -> None:
    _check_age("older_than", older_than)
    check_whole("batch", batch, 1, MOST_PURGED)


def check(connection: sa.Connection, make_tables: str = MAKE_TABLES) -> None:
    """Raises InvalidRequest if an inbox cannot work in this database; `make_tables` says how to create the tables."""
    check_transactions(connection)
    verify(connection, CLAIMS)
    for table in (notify_inbox, notify_source):
        if not has_table(connection, table.name):
            schema = named_by(connection)
            where = f"schema {schema!r}" if schema and table is notify_source else "database"
            raise InvalidRequest(f"the inbox's {where} has no table {table.name}: {make_tables}", "no_inbox_table")
    if not has_replay(connection):
        raise InvalidRequest(
            f"the table {notify_inbox.name} was made by an older version and has no column replay: call "
            "notify.client.create_tables(engine) again, or the Alembic helper in a new revision; rows are kept, and "
            "older services continue to work",
            "old_inbox_table",
        )


def check_inbox(inbox: object, *, is_async: bool) -> None:
    """Raises InvalidRequest if `inbox` is not an Inbox, or has an engine that this kind of consumer cannot use."""
    kind = type(inbox).__name__
    if not isinstance(inbox, Inbox):
        raise InvalidRequest(f"inbox is a {kind}: write inbox=Inbox(engine)", "invalid_inbox")
    if is_async_engine(inbox.engine) is not is_async:
        detail = (
            "AsyncConsumer needs an Inbox of an AsyncEngine; for a sync Engine, and for Django, use Consumer"
            if is_async
            else "Consumer needs an Inbox of a sync Engine; for an AsyncEngine use AsyncConsumer"
        )
        raise InvalidRequest(detail, "invalid_inbox")
