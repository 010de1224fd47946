"""Functions of every kind that take one argument: what producers and consumers must accept or refuse."""

from __future__ import annotations

import functools
from typing import Any


def plain(argument: Any) -> str:
    return "done"


async def coroutine(argument: Any) -> None: ...


def generator(argument: Any) -> Any:
    yield


async def async_generator(argument: Any) -> Any:
    yield


class Awaited:
    """An object whose call is a coroutine."""

    async def __call__(self, argument: Any) -> None: ...


@functools.wraps(coroutine)
def wrapping_a_coroutine(*arguments: Any) -> Any:
    return coroutine(*arguments)
