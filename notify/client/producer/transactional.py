"""Checks of the function and the session factory that `transactional` is given, and of what both return."""

from __future__ import annotations

import inspect
from typing import Any

from notify.errors import InvalidRequest
from notify.runtime.functions import is_coroutine_function, is_generator_function, name_of


def check_transactional(function: Any, *, is_async: bool) -> None:
    """Raises InvalidRequest if `transactional` cannot run `function` within a transaction: the transaction would commit
    before the body had run."""
    name = name_of(function)
    if not callable(function):
        raise InvalidRequest(f"{name} is not a function", "invalid_function")
    if is_generator_function(function):
        raise InvalidRequest(
            f"{name} has a `yield`: calling it runs nothing of it, and its transaction would commit nothing",
            "invalid_function",
        )
    is_coroutine = is_coroutine_function(function)
    if is_coroutine and not is_async:
        raise InvalidRequest(
            f"{name} is a coroutine function: TransactionProducer would commit before anything of it had run; use "
            "AsyncTransactionProducer",
            "invalid_function",
        )
    if is_async and not (is_coroutine or is_coroutine_function(inspect.unwrap(function))):
        raise InvalidRequest(
            f"{name} is a plain function, which would hold up the event loop: AsyncTransactionProducer runs `async "
            "def` functions, TransactionProducer plain ones",
            "invalid_function",
        )


def check_factory(factory: Any) -> None:
    """Raises InvalidRequest if `transactional` cannot call `factory` to make a session."""
    write = "write @producer.transactional(sessionmaker(engine))"
    if not callable(factory):
        raise InvalidRequest(f"transactional takes a session factory, not a {type(factory).__name__}: {write}")
    try:
        inspect.signature(factory).bind()
    except ValueError:
        return  # some functions written in C do not say what they take
    except TypeError as error:
        raise InvalidRequest(
            f"transactional calls {name_of(factory)} for a session, without arguments: {error}; {write}"
        ) from None


def check_made(session: Any, *, is_async: bool) -> None:
    """Raises InvalidRequest if a session factory made an object that is not a session of the expected kind."""
    if hasattr(session, "__aenter__" if is_async else "__enter__") and hasattr(session, "begin"):
        return
    name = type(session).__name__
    if hasattr(session, "__enter__" if is_async else "__aenter__"):
        use = "TransactionProducer" if is_async else "AsyncTransactionProducer"
        raise InvalidRequest(f"the session factory made a {name}: use {use}, or a factory of the other kind")
    raise InvalidRequest(f"the session factory made a {name}, which is not a session: give sessionmaker(engine)")


def refuse_coroutine(result: object) -> None:
    """Raises InvalidRequest if a plain function, such as a lambda or decorator around an `async def`, returned a
    coroutine, which nobody would await."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidRequest(
            "the function returned a coroutine, nothing of which has run: its transaction is rolled back; use "
            "AsyncTransactionProducer",
            "invalid_function",
        )
