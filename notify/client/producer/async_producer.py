"""AsyncTransactionProducer: the producer for coroutines, on their own event loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from sqlalchemy.util import greenlet_spawn

from notify.check.listener import CheckMessageListener, Outcome
from notify.check.local import is_async
from notify.client.producer.binding import Binding, existing, no_session, unscoped
from notify.client.producer.half_sender import HalfSender
from notify.client.producer.handles import AsyncTransactionHandle, Prepared, Sending
from notify.client.producer.options import (
    FLUSH_SECONDS,
    ProducerOptions,
    ProducerPlan,
    check_check_after,
    check_flush,
    takes_options,
)
from notify.client.producer.outgoing import LoopOutgoing
from notify.client.producer.packing import pack, pack_all, pack_schedule
from notify.client.producer.sent import Sent
from notify.client.producer.transactional import check_factory, check_made, check_transactional
from notify.client.producer.withdrawals import (
    AsyncWithdrawal,
    Target,
    async_withdrawing,
    cancellation,
    replacement,
)
from notify.errors import BindingRefused
from notify.protocol.message import Message
from notify.runtime import tracing
from notify.runtime.databases import check_engine

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

P = ParamSpec("P")
R = TypeVar("R")


class AsyncTransactionProducer:
    """Sends messages with the transactions of AsyncSession and AsyncConnection, without blocking the event loop.

    Use it as `async with`. The arguments are those of TransactionProducer. The producer answers checks on the event
    loop: from its construction if a loop is running then, otherwise from `async with`, `await start()` or the first
    send. If you construct it at import time, call `await producer.start()` when the application starts.
    """

    @takes_options
    def __init__(
        self,
        url: str,
        *,
        group: str,
        engine: Any = None,
        readers: Sequence[Any] = (),
        **options: Unpack[ProducerOptions],
    ) -> None:
        if engine is not None:
            check_engine(engine, is_async=True)
        if engine is not None and not is_async(engine):
            raise BindingRefused("a sync Engine needs TransactionProducer; give this one an AsyncEngine")
        self._plan = ProducerPlan(url=url, group=group, engine=engine, **options)
        self.url = url
        self.group = group
        self.mode = self._plan.mode
        self.outgoing = LoopOutgoing(self._plan)
        self._binding: Binding | None = None
        if engine is not None:
            self._binding = Binding(engine.sync_engine, HalfSender(self.outgoing, self._plan), readers)
            self.outgoing.start_in_a_loop()

    async def start(self) -> None:
        """Begin to answer checks, if the producer does not answer them yet. Raises Closed after `close`."""
        self.outgoing.start()

    @property
    def instance(self) -> str:
        """The name of this process among the instances of its group."""
        return self._plan.instance

    @property
    def binding(self) -> Binding:
        """The binding of messages to transactions of the engine. Raises BindingRefused if there is no engine."""
        return existing(self._binding)

    def add_check_listener(self, listener: CheckMessageListener) -> None:
        """Let a listener answer the checks of its topics, instead of the local table. Raises InvalidRequest."""
        self._plan.add_listener(listener)
        self.outgoing.start_in_a_loop()

    def send(self, session: Any, message: Message) -> Coroutine[Any, Any, Sent]:
        """Send a message with the transaction of an AsyncSession, or of the current session of an
        async_scoped_session; see TransactionProducer.send. Await the result: if it is not awaited, the transaction's
        commit raises BindingRefused."""
        session = _checked(session)
        unfinished = self.binding.unfinished(session.sync_session)
        return Sending(self._send(session, message), unfinished)

    async def _send(self, session: Any, message: Message) -> Sent:
        self.outgoing.start()
        sent: Sent = await session.run_sync(self.binding.send_in_session, message)
        return sent

    def cancel(
        self, session: Any, message: Target, *, topic: str | None = None, key: str | int | None = None
    ) -> Coroutine[Any, Any, AsyncWithdrawal]:
        """Cancel a delayed message with the transaction of an AsyncSession; see TransactionProducer.cancel. Await the
        result, as that of `send`."""
        return self._withdraw(session, cancellation(message, topic=topic, key=key))

    def replace(self, session: Any, message: Target, by: Message) -> Coroutine[Any, Any, AsyncWithdrawal]:
        """Replace a delayed message with the transaction of an AsyncSession; see TransactionProducer.replace. Await the
        result, as that of `send`."""
        return self._withdraw(session, replacement(message, by))

    def _withdraw(self, session: Any, message: Message) -> Coroutine[Any, Any, AsyncWithdrawal]:
        session = _checked(session)
        unfinished = self.binding.unfinished(session.sync_session)

        async def withdraw() -> AsyncWithdrawal:
            return async_withdrawing(await self._send(session, message), self.outgoing.outcome_of_withdrawal)

        return Sending(withdraw(), unfinished)

    def withdrawal(self, message_id: str) -> AsyncWithdrawal:
        """A withdrawal that was sent earlier, by its id: its `outcome` says what became of it."""
        return AsyncWithdrawal(None, 0, None, self.outgoing.outcome_of_withdrawal, message_id)

    @contextlib.asynccontextmanager
    async def transaction(self, target: Any) -> AsyncIterator[AsyncTransactionHandle]:
        """Send messages within the transaction of an AsyncSession or AsyncConnection; see
        TransactionProducer.transaction."""
        self.outgoing.start()
        target = unscoped(target)
        if hasattr(target, "sync_session"):
            session_handle = AsyncTransactionHandle(
                functools.partial(self.send, target), self.outgoing.outcome_of_withdrawal
            )
            if target.in_transaction():
                yield session_handle
                session_handle.check()
            else:
                async with target.begin():
                    yield session_handle
                    session_handle.check()
            return
        if not hasattr(target, "sync_connection"):
            raise BindingRefused(no_session(target, "AsyncSession"))
        binding = self.binding
        handle = AsyncTransactionHandle(
            functools.partial(target.run_sync, binding.send_in_connection), self.outgoing.outcome_of_withdrawal
        )
        if target.in_transaction():
            yield handle
            handle.check()
            return
        async with target.begin():
            yield handle
            handle.check()
            pending = binding.pending(target.sync_connection)
        if pending is not None:
            await greenlet_spawn(binding.committed, pending)

    def transactional(
        self, session_factory: Callable[[], Any]
    ) -> Callable[[Callable[Concatenate[Any, P], Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorator for coroutine functions: opens an AsyncSession, passes it first, commits it.

        Raises InvalidRequest if `session_factory` makes no session, for a plain function, and for a generator.
        """
        check_factory(session_factory)

        def decorate(function: Callable[Concatenate[Any, P], Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            check_transactional(function, is_async=True)

            @functools.wraps(function)
            async def call(*args: P.args, **kwargs: P.kwargs) -> R:
                session_context = session_factory()
                check_made(session_context, is_async=True)
                async with session_context as session, session.begin():
                    return await function(session, *args, **kwargs)

            return call

        return decorate

    async def publish(self, message: Message) -> str:
        """Send a message without a transaction and return its id. The message is durable when this returns."""
        packed = pack(message, self._plan.bodies)
        await self.outgoing.upload_soon([packed])
        with tracing.sending([packed]):
            return await self.outgoing.start().client.publish(packed)

    async def schedule(
        self,
        name: str,
        message: Message,
        *,
        cron: str | None = None,
        every: float | timedelta | None = None,
        zone: str | ZoneInfo = "UTC",
        catch_up: str = "last",
        catch_up_most: int = 100,
    ) -> list[datetime]:
        """Send a message repeatedly, and return the next instants; see TransactionProducer.schedule."""
        packed = pack_schedule(message, cron, every, zone, catch_up, catch_up_most)
        return await self.outgoing.start().client.schedule(name, packed)

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule; whether there was one."""
        return await self.outgoing.start().client.unschedule(name)

    async def prepare(self, messages: Sequence[Message], *, check_after: float | None = None) -> Prepared:
        """Store a half for a transaction that is not in a database; end it with commit() or rollback().

        `check_after`: seconds until the server asks for the outcome; None: the producer's setting. Raises
        InvalidRequest, TransactionRefused, Unavailable, and Closed after `close`.
        """
        if check_after is not None:
            check_check_after(check_after)
        packed = pack_all(messages, self._plan.bodies)
        await self.outgoing.upload_soon(packed)
        with tracing.sending(packed):
            item = await self.outgoing.start().client.prepare(packed, check_after)
        return Prepared(self.resolve, item.id, item.shard)

    async def resolve(self, prepared: Prepared, outcome: Outcome) -> str:
        """Record the outcome of a prepared half and return the transaction's state.

        Raises OutcomeConflict if the server has recorded the opposite outcome, IdInUse if the half belongs to another
        producer group.
        """
        return await self.outgoing.start().resolve(prepared.id, prepared.shard, outcome)

    async def flush(self, timeout: float = FLUSH_SECONDS) -> list[str]:
        """Wait at most `timeout` seconds until the server has every outcome that is on its way, and every message whose
        `publish` is; see TransactionProducer.flush.

        Raises BindingRefused on another event loop than the one that the producer runs on, if that is still open.
        """
        return await self.outgoing.flush(check_flush(timeout))

    async def close(self) -> None:
        """Send the outcomes that wait, stop answering checks, and close the connections.

        Raises BindingRefused on another event loop than the one that the producer runs on, if that is still open.
        """
        if self.outgoing.is_closed:
            return
        self.outgoing.refuse_other_loop()
        if self._binding is not None:
            self._binding.detach()
        await self.outgoing.close()

    async def __aenter__(self) -> AsyncTransactionProducer:
        self.outgoing.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _checked(session: Any) -> Any:
    """The AsyncSession. Raises BindingRefused for another object."""
    session = unscoped(session)
    if not hasattr(session, "sync_session"):
        raise BindingRefused(no_session(session, "AsyncSession"))
    return session
