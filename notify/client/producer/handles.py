"""Handles: what the calls of a producer return: the object of a `with producer.transaction(…)` block, the awaitable of
an asynchronous `send`, and a prepared half that its sender ends itself."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

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

T = TypeVar("T")

FORGOTTEN = (
    "a message was sent without await, so nothing is committed: write `await producer.send(…)` or `await tx.send(…)`"
)


class Sending(Coroutine[Any, Any, T]):
    """The awaitable that the asynchronous `send` returns. It is in `unfinished` until it has ended, so that a commit
    before its end is refused: it may be dropped, kept in a variable, or left to a task that runs later. Otherwise the
    transaction would commit without its message, and Python would at most warn."""

    __slots__ = ("_coroutine", "_has_begun", "_token", "_unfinished")

    def __init__(self, coroutine: Coroutine[Any, Any, T], unfinished: set[object]) -> None:
        self._coroutine = coroutine
        self._unfinished = unfinished
        self._token = object()  # not this object itself, which the set would keep
        self._has_begun = False
        unfinished.add(self._token)

    def __await__(self) -> Generator[Any, None, T]:
        self._has_begun = True
        try:
            return (yield from self._coroutine.__await__())
        finally:
            self._unfinished.discard(self._token)

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(
        self, kind: Any, value: BaseException | object | None = None, traceback: TracebackType | None = None
    ) -> Any:
        return self._step(self._coroutine.throw, value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._has_begun = True
        self._unfinished.discard(self._token)
        self._coroutine.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        self._has_begun = True
        try:
            return step(value)
        except BaseException:  # its result is a StopIteration
            self._unfinished.discard(self._token)
            raise

    def __del__(self) -> None:
        if self._has_begun:
            return
        self._coroutine.close()
        warnings.warn("send(…) was never awaited: write `await`", RuntimeWarning, stacklevel=2)


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

    __slots__ = ("_ask", "_send", "_unfinished")

    def __init__(
        self,
        send: Callable[[Message], Awaitable[Sent]],
        ask: Callable[[Sent, float], Awaitable[WithdrawalOutcome]],
    ) -> None:
        self._send = send
        self._ask = ask
        self._unfinished: set[object] = set()

    def send(self, message: Message) -> Coroutine[Any, Any, Sent]:
        """Send a message with this transaction. Await the result: if it is not awaited, nothing is committed."""
        return Sending(self._call(message), self._unfinished)

    def cancel(
        self, message: Target, *, topic: str | None = None, key: str | int | None = None
    ) -> Coroutine[Any, Any, AsyncWithdrawal]:
        """Cancel a delayed message with this transaction; see TransactionProducer.cancel. Await the result."""
        return Sending(self._withdraw(cancellation(message, topic=topic, key=key)), self._unfinished)

    def replace(self, message: Target, by: Message) -> Coroutine[Any, Any, AsyncWithdrawal]:
        """Replace a delayed message with this transaction; see TransactionProducer.replace. Await the result."""
        return Sending(self._withdraw(replacement(message, by)), self._unfinished)

    async def _call(self, message: Message) -> Sent:
        return await self._send(message)

    async def _withdraw(self, message: Message) -> AsyncWithdrawal:
        return async_withdrawing(await self._send(message), self._ask)

    def check(self) -> None:
        """Raises BindingRefused if a send was not awaited to its end."""
        if self._unfinished:
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
