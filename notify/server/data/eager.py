"""A coroutine that runs to its first wait immediately, and is awaited later, without a task.

So the two parts of a request append their records before either waits, and share the wait for the disk. A task for each
part would cost more than the smaller part (asyncio has eager tasks only since Python 3.12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Eager(Generic[T]):
    """A coroutine begun by a `with` statement, inside which it is awaited once; the end closes it if it was not."""

    __slots__ = ("_awaited", "_coroutine", "_ended", "_error", "_result")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._awaited: Any = None
        """The future that the coroutine waits for first; None if it yields to the loop."""
        self._ended = False
        self._result: T
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        try:
            self._awaited = self._coroutine.send(None)
        except StopIteration as end:
            self._ended, self._result = True, end.value
        except BaseException as error:
            self._ended, self._error = True, error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._coroutine.close()
        waited_for = self._awaited
        if isinstance(waited_for, asyncio.Future) and waited_for.done() and not waited_for.cancelled():
            waited_for.exception()  # otherwise asyncio logs that it was never retrieved

    def __await__(self) -> Generator[Any, Any, T]:
        if self._error is not None:
            raise self._error
        if self._ended:
            return self._result
        if self._awaited is None or not self._awaited.done():
            yield self._awaited
        return (yield from self._coroutine.__await__())
