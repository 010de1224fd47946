"""Handles: what the calls of a producer return: the object of a `with producer.transaction(…)` block, the awaitable of
an asynchronous `send`, and a prepared half that its sender ends itself."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.orm import Session

from notify.check.listener import Outcome
from notify.client.producer.sent import Sent
from notify.client.producer.withdrawals import (
    AsyncWithdrawal,
    Target,
    Withdrawal,
    WithdrawalOutcome,
    async_withdrawing,
    cancellation,
    replacement,
    withdrawing,
)
from notify.errors import BindingRefused
from notify.protocol.message import Message

FORGOTTEN = (
    "a message was sent without await, so nothing is committed: write `await producer.send(…)` or `await tx.send(…)`"
)


T = TypeVar("T")


class Sending(Coroutine[Any, Any, T]):
    """The awaitable that the asynchronous `send` returns. If it is dropped before it has begun, it calls `forgotten`,
    so that the transaction is refused; otherwise Python would only warn, and the transaction would commit without its
    message."""

    __slots__ = ("_coroutine", "_forgotten", "_has_begun")

    def __init__(self, coroutine: Coroutine[Any, Any, T], forgotten: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._forgotten = forgotten
        self._has_begun = False

    def __await__(self) -> Generator[Any, None, T]:
        self._has_begun = True
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        self._has_begun = True
        return self._coroutine.send(value)

    def throw(
        self, kind: Any, value: BaseException | object | None = None, traceback: TracebackType | None = None
    ) -> Any:
        self._has_begun = True
        return self._coroutine.throw(value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._has_begun = True
        self._coroutine.close()

    def __del__(self) -> None:
        if self._has_begun:
            return
        self.close()
        self._forgotten()
        warnings.warn("send(…) was never awaited: write `await`", RuntimeWarning, stacklevel=2)


def refuse_commit(session: Session) -> None:
    """Make the session's current transaction refuse to commit. Later transactions may commit."""
    root = session.get_transaction()

    def refuse(committing: Session) -> None:
        if root is None or committing.get_transaction() is root:
            raise BindingRefused(FORGOTTEN)

    event.listen(session, "before_commit", refuse, once=True)


class TransactionHandle:
    """The object of `with producer.transaction(…) as tx`, which sends messages with this transaction."""

    __slots__ = ("_ask", "_send")

    def __init__(self, send: Callable[[Message], Sent], ask: Callable[[Sent, float], WithdrawalOutcome]) -> None:
        self._send = send
        self._ask = ask

    def send(self, message: Message) -> Sent:
        """Send a message with this transaction; what is returned has its id."""
        return self._send(message)

    def cancel(self, message: Target, *, topic: str | None = None, key: str | int | None = None) -> Withdrawal:
        """Cancel a delayed message with this transaction; see TransactionProducer.cancel."""
        return withdrawing(self._send(cancellation(message, topic=topic, key=key)), self._ask)

    def replace(self, message: Target, by: Message) -> Withdrawal:
        """Replace a delayed message with this transaction; see TransactionProducer.replace."""
        return withdrawing(self._send(replacement(message, by)), self._ask)


class AsyncTransactionHandle:
    """The object of `async with producer.transaction(…) as tx`."""

    __slots__ = ("_ask", "_has_forgotten", "_send")

    def __init__(
        self,
        send: Callable[[Message], Awaitable[Sent]],
        ask: Callable[[Sent, float], Awaitable[WithdrawalOutcome]],
    ) -> None:
        self._send = send
        self._ask = ask
        self._has_forgotten = False

    def send(self, message: Message) -> Coroutine[Any, Any, Sent]:
        """Send a message with this transaction. Await the result: if it is not awaited, nothing is committed."""
        return Sending(self._call(message), self._forget)

    def cancel(
        self, message: Target, *, topic: str | None = None, key: str | int | None = None
    ) -> Coroutine[Any, Any, AsyncWithdrawal]:
        """Cancel a delayed message with this transaction; see TransactionProducer.cancel. Await the result."""
        return Sending(self._withdraw(cancellation(message, topic=topic, key=key)), self._forget)

    def replace(self, message: Target, by: Message) -> Coroutine[Any, Any, AsyncWithdrawal]:
        """Replace a delayed message with this transaction; see TransactionProducer.replace. Await the result."""
        return Sending(self._withdraw(replacement(message, by)), self._forget)

    async def _call(self, message: Message) -> Sent:
        return await self._send(message)

    async def _withdraw(self, message: Message) -> AsyncWithdrawal:
        return async_withdrawing(await self._send(message), self._ask)

    def _forget(self) -> None:
        self._has_forgotten = True

    def check(self) -> None:
        """Raises BindingRefused if a send was not awaited."""
        if self._has_forgotten:
            raise BindingRefused(FORGOTTEN)


class SyncPrepared:
    """A half that the server holds, for threads. End it with commit() or rollback()."""

    __slots__ = ("_resolve", "id", "shard")

    def __init__(
        self, resolve: Callable[[str, str | None, Outcome], str], transaction_id: str, shard: str | None
    ) -> None:
        """`resolve` records an outcome of the half and returns the recorded state."""
        self._resolve = resolve
        self.id = transaction_id
        self.shard = shard

    def commit(self) -> str:
        """Make the half a message and return the recorded state. Raises OutcomeConflict if a rollback is recorded."""
        return self._resolve(self.id, self.shard, Outcome.COMMIT)

    def rollback(self) -> str:
        """Discard the half and return the recorded state. Raises OutcomeConflict if a commit is recorded."""
        return self._resolve(self.id, self.shard, Outcome.ROLLBACK)


class Prepared:
    """A half that the server holds, of a transaction outside of a database. End it with commit() or rollback()."""

    __slots__ = ("_resolve", "id", "shard")

    def __init__(
        self, resolve: Callable[[Prepared, Outcome], Awaitable[str]], transaction_id: str, shard: str | None
    ) -> None:
        """`resolve` records an outcome of the half and returns the recorded state."""
        self._resolve = resolve
        self.id = transaction_id
        self.shard = shard

    async def commit(self) -> str:
        """Make the half a message and return the recorded state. Raises OutcomeConflict if a rollback is recorded."""
        return await self._resolve(self, Outcome.COMMIT)

    async def rollback(self) -> str:
        """Discard the half and return the recorded state. Raises OutcomeConflict if a commit is recorded."""
        return await self._resolve(self, Outcome.ROLLBACK)
