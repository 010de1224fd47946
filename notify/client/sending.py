"""Sending: the awaitable that the asynchronous `send` returns. If it is never awaited, the transaction is refused;
otherwise Python would only warn, and the transaction would commit without its message."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from notify.errors import BindingRefused

FORGOTTEN = (
    "a message was sent without await, so nothing is committed: write `await producer.send(…)` or `await tx.send(…)`"
)


class Sending(Coroutine[Any, Any, None]):
    """A coroutine that calls `forgotten` if it is dropped before it has begun."""

    __slots__ = ("_coroutine", "_forgotten", "_has_begun")

    def __init__(self, coroutine: Coroutine[Any, Any, None], forgotten: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._forgotten = forgotten
        self._has_begun = False

    def __await__(self) -> Generator[Any, None, None]:
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
