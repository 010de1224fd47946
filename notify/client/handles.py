"""Handles: the object of a `with producer.transaction(…)` block, and a prepared half that its sender ends itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from notify.check.listener import Outcome
from notify.client.sending import FORGOTTEN, Sending
from notify.errors import BindingRefused
from notify.protocol.message import Message


class TransactionHandle:
    """The object of `with producer.transaction(…) as tx`, which sends messages with this transaction."""

    __slots__ = ("_send",)

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send

    def send(self, message: Message) -> None:
        """Send a message with this transaction."""
        self._send(message)


class AsyncTransactionHandle:
    """The object of `async with producer.transaction(…) as tx`."""

    __slots__ = ("_has_forgotten", "_send")

    def __init__(self, send: Callable[[Message], Awaitable[object]]) -> None:
        self._send = send
        self._has_forgotten = False

    def send(self, message: Message) -> Coroutine[Any, Any, None]:
        """Send a message with this transaction. Await the result: if it is not awaited, nothing is committed."""
        return Sending(self._call(message), self._forget)

    async def _call(self, message: Message) -> None:
        await self._send(message)

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
