"""Kinds of functions that users pass in, and their names in errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def is_coroutine_function(function: Any) -> bool:
    """Whether `function` is an `async def` without `yield`."""
    return _is(function, inspect.iscoroutinefunction)


def is_generator_function(function: Any) -> bool:
    """Whether `function` has a `yield`, so that a call runs nothing of its body."""
    return _is(function, inspect.isgeneratorfunction) or _is(function, inspect.isasyncgenfunction)


def name_of(function: Any) -> str:
    """The function's name in an error."""
    return getattr(function, "__qualname__", None) or repr(function)[:100]


def _is(function: Any, kind: Callable[[Any], bool]) -> bool:
    """Whether a function, the function of a partial, or the `__call__` of an object is of this kind."""
    while isinstance(function, functools.partial):
        function = function.func
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004
