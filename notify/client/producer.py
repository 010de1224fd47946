"""TransactionProducer and AsyncTransactionProducer: thin shells over one client, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import socket
import ssl
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import await_only

from notify import tracing
from notify.check.listener import CheckMessageListener, Outcome
from notify.check.local import is_async
from notify.client.binding import CLOSED, Binding, unscoped
from notify.client.callables import check_transactional, refuse_coroutine
from notify.client.checker import Checker
from notify.client.http import error_of
from notify.client.inbox import PURGE_AFTER_SECONDS
from notify.client.login import Shown
from notify.client.loop import LoopThread
from notify.client.purge import RowPurge, check_purge_after
from notify.client.transactions import HALF_SECONDS, TransactionClient, accepted, pack
from notify.errors import BindingRefused, Closed, InvalidRequest, Timeout, Unavailable
from notify.limits import LIMITS, check_between, check_name
from notify.message import Message, number_of_seconds
from notify.wire import Item, PackedMessage

P = ParamSpec("P")
R = TypeVar("R")

Mode = Literal["half", "outbox"]
MODES: tuple[Mode, ...] = ("half", "outbox")


def instance_name() -> str:
    """Names this process among the instances of its group."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class Prepared:
    """A half that the server holds, of a transaction that is not a database's: settle it yourself."""

    __slots__ = ("_producer", "id", "shard")

    def __init__(self, producer: AsyncTransactionProducer, transaction_id: str, shard: str | None) -> None:
        self._producer = producer
        self.id = transaction_id
        self.shard = shard

    async def commit(self) -> str:
        """Make it a message; the recorded state. Raises OutcomeConflict if a rollback is recorded."""
        return await self._producer.resolve(self, Outcome.COMMIT)

    async def rollback(self) -> str:
        """Discard it; the recorded state. Raises OutcomeConflict if a commit is recorded."""
        return await self._producer.resolve(self, Outcome.ROLLBACK)


class TransactionHandle:
    """The object of `with producer.transaction(…) as tx`: it sends into that transaction."""

    __slots__ = ("_send",)

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send

    def send(self, message: Message) -> None:
        """Send a message with this transaction."""
        self._send(message)


class _Producer:
    """Base of both producers: settings and the binding."""

    def __init__(
        self,
        url: str,
        group: str,
        engine: Any,
        mode: Mode,
        batching: bool,
        answer_checks: bool,
        half_timeout: float,
        check_after: float | None,
        purge_after: float | None,
        token: Shown,
        tls: ssl.SSLContext | None,
    ) -> None:
        check_name("producer_group", group)
        if check_after is not None:
            _check_check_after(check_after)
        if purge_after is not None:
            purge_after = number_of_seconds("purge_after", purge_after)
        check_purge_after(purge_after)
        if mode not in MODES:
            raise InvalidRequest(f"mode {mode!r} is neither half nor outbox")
        if mode == "outbox" and engine is None:
            raise InvalidRequest("mode outbox needs the engine: messages wait in its half_message table")
        self.url = url
        self.group = group
        self.mode = mode
        self.instance = instance_name()
        self._batching = batching
        self._answer_checks = answer_checks
        self._half_timeout = half_timeout
        self._check_after = check_after
        self._purge_after = purge_after
        self._token, self._tls = token, tls
        self._listeners: list[CheckMessageListener] = []
        self._given_engine = engine
        self.engine: Engine = getattr(engine, "sync_engine", engine)
        self._binding = Binding(self) if engine is not None else None  # type: ignore[arg-type]
        self._closed = False

    def add_check_listener(self, listener: CheckMessageListener) -> None:
        """Have a listener answer checks for its topics, instead of the local table. Raises InvalidRequest."""
        name = type(listener).__name__
        if not listener.topics:
            raise InvalidRequest(f"{name} names no topics")
        if isinstance(listener.topics, str):
            raise InvalidRequest(f"{name}.topics is text; it should be a list of topics, such as [{listener.topics!r}]")
        if inspect.iscoroutinefunction(listener.check):
            raise InvalidRequest(f"{name}.check is a coroutine function; it is called in a thread: write `def check`")
        self._listeners.append(listener)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Closed(CLOSED)

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise BindingRefused("this producer has no engine: give engine= to bind messages to its transactions")
        return self._binding

    def _client(self) -> TransactionClient:
        return TransactionClient(
            self.url,
            self.group,
            instance=self.instance,
            batching=self._batching,
            half_seconds=self._half_timeout,
            check_after=self._check_after,
            token=self._token,
            tls=self._tls,
        )

    def _checker(self, client: TransactionClient) -> Checker | None:
        if not self._answer_checks or (self._given_engine is None and not self._listeners):
            return None
        return Checker(client, self._given_engine, self._listeners)

    def _background(self, client: TransactionClient) -> _Answering | None:
        """Answer checks, and purge the table that answers them, from now on; None where there is nothing to answer."""
        checker = self._checker(client)
        if checker is None:
            return None
        purging = None
        if self._given_engine is not None and self._purge_after is not None:
            purging = RowPurge(client.http, self.group, self._given_engine, self._purge_after)
        return _Answering(checker, purging)


class TransactionProducer(_Producer):
    """Sends messages with the transactions of a SQLAlchemy engine, from threads.

    `url`: the server; `group`: the producer group, whose instances share one database; `engine`: where the local
    transactions run; `mode`: `half` (server first, one round trip) or `outbox` (the table, moved by `notify relay`).
    Times in seconds: `half_timeout` to wait for the server; `check_after` until the server asks what became of a half,
    None: its own 5. `batching`: whether halves of several threads share a request; `answer_checks`: whether this
    process answers checks, from its construction on; `purge_after`: where it does, half_message rows of this group
    whose outcome the server has go after so long, a day at least; None: they stay. `token`, `tls`: what to show and to
    believe; None: what the environment says (`NOTIFY_TOKEN` or `NOTIFY_TOKEN_FILE`, `NOTIFY_CA`). `token` may be a
    function that gives the one to show now, without blocking: it is called again every 10 s, and when a server refuses
    the one before. Raises InvalidRequest, and BindingRefused for an AsyncEngine.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        engine: Engine | None = None,
        mode: Mode = "half",
        batching: bool = True,
        answer_checks: bool = True,
        half_timeout: float = HALF_SECONDS,
        check_after: float | None = None,
        purge_after: float | None = PURGE_AFTER_SECONDS,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if engine is not None and is_async(engine):
            raise BindingRefused("an AsyncEngine needs AsyncTransactionProducer: this one would block the event loop")
        super().__init__(
            url, group, engine, mode, batching, answer_checks, half_timeout, check_after, purge_after, token, tls
        )
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()
        self._running: tuple[TransactionClient, _Answering | None] | None = None
        self._abandoned: object = None
        _alive.add(self)
        if engine is not None:
            self._start()

    # --- threads ----------------------------------------------------------------------------------------------

    def _start(self) -> tuple[LoopThread, TransactionClient]:
        self._refuse_if_closed()
        if self._thread is None or self._running is None:
            with self._starting:  # threads that are the first at the same time start one loop
                if self._thread is None or self._running is None:
                    thread = LoopThread(f"notify-producer-{self.group}")
                    self._running = thread.run(self._make())
                    self._thread = thread
        return self._thread, self._running[0]

    async def _make(self) -> tuple[TransactionClient, _Answering | None]:
        client = self._client()
        return client, self._background(client)

    def _renew_after_fork(self) -> None:
        """The parent's thread does not exist in the child: its first use begins anew.

        Not here: a thread cannot be started before the fork has returned.
        """
        self._abandoned = (self._thread, self._running)  # the parent's loop must not be closed by this process
        self._thread = self._running = None
        self._starting = threading.Lock()  # another thread of the parent may have held it
        self.instance = instance_name()

    def add_check_listener(self, listener: CheckMessageListener) -> None:
        super().add_check_listener(listener)
        thread, _ = self._start()
        if self._running is not None and self._running[1] is None:
            self._running = thread.run(self._remake(self._running[0]))

    async def _remake(self, client: TransactionClient) -> tuple[TransactionClient, _Answering | None]:
        return client, self._background(client)

    # --- the binding's sender ---------------------------------------------------------------------------------

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        thread, client = self._start()
        client.source = source
        try:
            return accepted(thread.wait_for(lambda: client.half_soon(transaction_id, messages), self._half_timeout + 1))
        except TimeoutError:
            raise Timeout("the half was not answered in time") from None

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        running, thread = self._running, self._thread
        if running is not None and thread is not None and not self._closed:
            thread.call(_queue_outcome, running[0], transaction_id, shard, outcome)

    # --- public -----------------------------------------------------------------------------------------------

    def send(self, session: Session | scoped_session[Any], message: Message) -> None:
        """Send a message with the session's transaction: it becomes a message if and only if that commits.

        Raises InvalidRequest for what is no message, BindingRefused for a session that cannot carry it, Closed after
        `close`. The message is read here; only a key that is a callable is asked later, at the commit. The commit
        raises TransactionRefused if the server did not take the half, and Backpressure if it takes none for now: then
        the transaction may be tried again.
        """
        self.binding.send_in_session(unscoped(session), message)

    @contextlib.contextmanager
    def transaction(self, target: Session | scoped_session[Any] | Connection) -> Iterator[TransactionHandle]:
        """Sends into a transaction. If the session or connection has none yet, it begins here and commits at the end;
        otherwise this joins it, and the commit stays with its owner."""
        if isinstance(target, Connection):
            with self._connection_transaction(target) as handle:
                yield handle
            return
        session: Session = unscoped(target)
        handle = TransactionHandle(functools.partial(self.send, session))
        if session.in_transaction():
            yield handle
        else:
            with session.begin():
                yield handle

    @contextlib.contextmanager
    def _connection_transaction(self, connection: Connection) -> Iterator[TransactionHandle]:
        binding = self.binding
        handle = TransactionHandle(functools.partial(binding.send_in_connection, connection))
        if connection.in_transaction():
            yield handle  # its owner commits; SQLAlchemy tells nobody when that is over, so check-back resolves it
            return
        with connection.begin():
            yield handle
            bound = binding.bound(connection)
        if bound is not None:
            binding.committed(bound)

    def transactional(
        self, session_factory: Callable[[], Session]
    ) -> Callable[[Callable[Concatenate[Session, P], R]], Callable[P, R]]:
        """Decorator: opens a session, passes it first, commits it; an exception rolls back.

        Raises InvalidRequest for a coroutine function or one with a `yield`: it would run after the commit, or not.
        """

        def decorate(function: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
            check_transactional(function, is_async=False)

            @functools.wraps(function)
            def call(*args: P.args, **kwargs: P.kwargs) -> R:
                with session_factory() as session, session.begin():
                    result = function(session, *args, **kwargs)
                    refuse_coroutine(result)
                    return result

            return call

        return decorate

    def publish(self, message: Message) -> str:
        """Send a message without a transaction; its id. Durable when it returns.

        Raises InvalidRequest, Unavailable, IdInUse, and Closed after `close`.
        """
        thread, client = self._start()
        packed = pack(message)
        with tracing.sending([packed]):
            return thread.run(client.publish(packed))

    def close(self) -> None:
        """Flush outcomes that wait, stop answering checks, let go.

        A transaction that has messages and has not committed yet cannot commit any more: that raises
        TransactionRefused.
        """
        if self._closed:
            return
        thread, running = self._thread, self._running
        self._closed = True
        _alive.discard(self)
        if self._binding is not None:
            self._binding.detach()
        if thread is not None and running is not None:
            thread.run(_close(*running))
            thread.close()

    def __enter__(self) -> TransactionProducer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_check_after(seconds: float) -> None:
    low, high = LIMITS.check_after_min_seconds, LIMITS.check_after_max_seconds
    check_between("check_after", number_of_seconds("check_after", seconds), low, high)


def _queue_outcome(client: TransactionClient, transaction_id: str, shard: str | None, outcome: str) -> None:
    """On the loop. A refusal is no concern of the caller, whose transaction is over: check-back asks."""
    try:
        client.outcome_soon(transaction_id, shard, outcome)
    except Unavailable:
        return


class _Answering:
    """A checker, what purges the rows that it answers from, and the tasks that run them."""

    def __init__(self, checker: Checker, purging: RowPurge | None) -> None:
        self._checker, self._purging = checker, purging
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(part.run()) for part in (checker, purging) if part is not None]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._checker.close()
        if self._purging is not None:
            await self._purging.close()


async def _close(client: TransactionClient, answering: _Answering | None) -> None:
    if answering is not None:
        await answering.close()
    await client.close()


_alive: weakref.WeakSet[TransactionProducer] = weakref.WeakSet()


def _renew_all_after_fork() -> None:
    for producer in list(_alive):
        producer._renew_after_fork()


os.register_at_fork(after_in_child=_renew_all_after_fork)


class AsyncTransactionProducer(_Producer):
    """The asyncio twin: for AsyncSession and AsyncConnection, nothing blocks the loop. Use it as `async with`.

    The arguments are those of TransactionProducer. Checks are answered on the event loop: from the construction where
    that is within a running loop, else from `async with`, `await start()` or the first send. Made at import, before a
    loop runs, it answers nothing until then: call `await producer.start()` when the application starts.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        engine: Any = None,
        mode: Mode = "half",
        batching: bool = True,
        answer_checks: bool = True,
        half_timeout: float = HALF_SECONDS,
        check_after: float | None = None,
        purge_after: float | None = PURGE_AFTER_SECONDS,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if engine is not None and not is_async(engine):
            raise BindingRefused("a sync Engine needs TransactionProducer; give this one an AsyncEngine")
        super().__init__(
            url, group, engine, mode, batching, answer_checks, half_timeout, check_after, purge_after, token, tls
        )
        self._running: tuple[TransactionClient, _Answering | None] | None = None
        if engine is not None:
            self._start_in_a_loop()

    async def start(self) -> None:
        """Begin to answer checks, where that has not begun yet. Raises Closed after `close`."""
        self._started()

    def add_check_listener(self, listener: CheckMessageListener) -> None:
        super().add_check_listener(listener)
        self._start_in_a_loop()
        if self._running is not None and self._running[1] is None:
            client = self._running[0]
            self._running = (client, self._background(client))

    def _start_in_a_loop(self) -> None:
        """Start where an event loop runs already."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # `start`, or the first send, comes within one
        self._started()

    def _started(self) -> TransactionClient:
        self._refuse_if_closed()
        if self._running is None:
            client = self._client()
            self._running = (client, self._background(client))
        return self._running[0]

    # --- the binding's sender ---------------------------------------------------------------------------------

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        client = self._started()
        client.source = source
        return accepted(await_only(client.half_soon(transaction_id, messages)))

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        if self._running is not None:
            _queue_outcome(self._running[0], transaction_id, shard, outcome)

    # --- public -----------------------------------------------------------------------------------------------

    async def send(self, session: Any, message: Message) -> None:
        """Send a message with the transaction of an AsyncSession, or of an async_scoped_session's current one; see
        TransactionProducer.send."""
        self._started()
        await unscoped(session).run_sync(self.binding.send_in_session, message)

    @contextlib.asynccontextmanager
    async def transaction(self, target: Any) -> AsyncIterator[AsyncTransactionHandle]:
        """Sends into the transaction of an AsyncSession or AsyncConnection; see TransactionProducer.transaction."""
        self._started()
        target = unscoped(target)
        if hasattr(target, "sync_session"):
            session_handle = AsyncTransactionHandle(functools.partial(self.send, target))
            if target.in_transaction():
                yield session_handle
            else:
                async with target.begin():
                    yield session_handle
            return
        binding = self.binding
        handle = AsyncTransactionHandle(functools.partial(target.run_sync, binding.send_in_connection))
        if target.in_transaction():
            yield handle
            return
        async with target.begin():
            yield handle
            bound = binding.bound(target.sync_connection)
        if bound is not None:
            binding.committed(bound)

    def transactional(
        self, session_factory: Callable[[], Any]
    ) -> Callable[[Callable[Concatenate[Any, P], Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorator for coroutine functions: opens an AsyncSession, passes it first, commits it.

        Raises InvalidRequest for a plain function, and for one with a `yield`.
        """

        def decorate(function: Callable[Concatenate[Any, P], Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            check_transactional(function, is_async=True)

            @functools.wraps(function)
            async def call(*args: P.args, **kwargs: P.kwargs) -> R:
                async with session_factory() as session, session.begin():
                    return await function(session, *args, **kwargs)

            return call

        return decorate

    async def publish(self, message: Message) -> str:
        """Send a message without a transaction; its id. Durable when it returns."""
        packed = pack(message)
        with tracing.sending([packed]):
            return await self._started().publish(packed)

    async def prepare(self, messages: Sequence[Message], *, check_after: float | None = None) -> Prepared:
        """Store a half for a transaction of your own kind (no database): settle it with commit() or rollback().

        `check_after`: seconds until the server asks what became of it; None: the producer's. Raises InvalidRequest,
        TransactionRefused, Unavailable, and Closed after `close`.
        """
        if check_after is not None:
            _check_check_after(check_after)
        packed = [pack(m) for m in messages]
        with tracing.sending(packed):
            item = await self._started().half(packed, check_after=check_after)
        return Prepared(self, item.id, item.shard)

    async def resolve(self, prepared: Prepared, outcome: Outcome) -> str:
        """Record the outcome of a prepared half; the state.

        Raises OutcomeConflict if the opposite is recorded, IdInUse if the half is another producer group's.
        """
        item = await self._started().outcome_soon(prepared.id, prepared.shard, outcome.value)
        if item.status != 200:
            raise error_of(item.status, item.code or "refused", item.detail or "")
        return item.state or ""

    async def close(self) -> None:
        """Flush outcomes that wait, stop answering checks, let go."""
        self._closed = True
        running, self._running = self._running, None
        if self._binding is not None:
            self._binding.detach()
        if running is not None:
            await _close(*running)

    async def __aenter__(self) -> AsyncTransactionProducer:
        self._started()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncTransactionHandle:
    """The object of `async with producer.transaction(…) as tx`."""

    __slots__ = ("_send",)

    def __init__(self, send: Callable[[Message], Awaitable[object]]) -> None:
        self._send = send

    async def send(self, message: Message) -> None:
        """Send a message with this transaction."""
        await self._send(message)
