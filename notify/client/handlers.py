"""Handlers: the functions that a consumer runs, what each one wants of its topic, and whether they can be called."""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

from notify.client.callables import is_coroutine_function, is_generator_function, name_of
from notify.client.typed import Read, reader_of
from notify.errors import InvalidRequest
from notify.limits import LIMITS, MODES, check_between, check_name, check_whole
from notify.message import ReceivedMessage

REASON_CHARACTERS = 500
"""How much of a handler's error goes to the server with a retry or a dead letter."""
PLACE_CHARACTERS = 150
MOST_FRAMES = 1000
"""Frames of a traceback that are looked at; a deeper one is an endless recursion."""
_SDK = str(Path(__file__).parents[1] / "_")[:-1]
_PYTHON = tuple({sysconfig.get_path(name) + _SDK[-1] for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(slots=True)
class Handler:
    """A function and the subscription that feeds it; see `Consumer.subscribe`."""

    topic: str
    call: Callable[..., Any]
    mode: str
    tags: tuple[str, ...]
    start: str | int | datetime | None
    max_attempts: int
    filter: str
    retry_min: float
    retry_max: float
    batch: int | None = None
    """The most messages that it is called with at a time; None: it is called with one, not with a list."""
    read: Read | None = None
    """Its decoder of messages; None where it takes messages as they are."""

    def handle(self, message: ReceivedMessage, *session: Any) -> Any:
        """Call the function with one message; its result is a coroutine where the function is a coroutine function.

        Raises DeadLetter where the body does not fit what the function takes.
        """
        return self.call(message if self.read is None else self.read(message), *session)


def handler_of(handlers: Mapping[str, Handler], topic: str) -> Handler | None:
    """The handler subscribed to a topic by name, else the first one by a pattern."""
    named = handlers.get(topic)
    return named or next((h for pattern, h in handlers.items() if fnmatchcase(topic, pattern)), None)


def is_cancelled(error: BaseException) -> bool:
    """Whether an error that a handler raised says that the consumer cancels the handler's task.

    A CancelledError may also come from within, such as from a task that the handler awaits and somebody else cancelled:
    then it is the handler's failure like another.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def check_options(
    topic: str,
    mode: str,
    tags: Sequence[str],
    max_attempts: int,
    retry: tuple[float, float],
    batch: int | None,
    in_hand: int | None,
) -> None:
    """Raises InvalidRequest for options of a subscription that the server would refuse, or that cannot be together.

    `retry`: the shortest and the longest wait, in seconds. `in_hand`: messages that the consumer holds at most, where
    that was given.
    """
    if not isinstance(topic, str):
        raise InvalidRequest(
            f'subscribe takes a topic, not a {type(topic).__name__}: write @consumer.subscribe("topic")', "invalid_name"
        )
    check_name("topic", topic.replace("*", "x"))
    if mode not in MODES:
        raise InvalidRequest(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
    if mode == "broadcast" and "*" in topic:
        raise InvalidRequest("a pattern cannot be broadcast: subscribe to its topics by name")
    for tag in tags:
        check_name("tag", tag)
    check_between("max_attempts", max_attempts, 1, LIMITS.attempts)
    check_between("retry_min", retry[0], LIMITS.retry_min_seconds, LIMITS.retry_first_seconds)
    check_between("retry_max", retry[1], retry[0], LIMITS.retry_max_seconds)
    if batch is not None:
        check_whole("batch", batch, 1, LIMITS.max_messages)
        if in_hand is not None and batch > in_hand:
            raise InvalidRequest(
                f"a batch of {batch} messages cannot be had where the consumer holds {in_hand} at most: give the "
                f"consumer a batch= of at least {batch}, or none",
                "out_of_bounds",
            )


def check_callable(
    function: Callable[..., Any], *, is_async: bool, has_session: bool, in_batches: bool = False
) -> Read | None:
    """Raises InvalidRequest unless a consumer of this kind can call the function: each message would fail otherwise.

    The result is its decoder of messages, see `reader_of`. `in_batches`: it is called with lists.
    """
    name = name_of(function)
    if not callable(function):
        raise InvalidRequest(f"the handler {name} is no function", "invalid_handler")
    if is_async and not (is_coroutine_function(function) or is_coroutine_function(inspect.unwrap(function))):
        raise InvalidRequest(
            f"the handler {name} is a plain function, which would hold up the event loop: AsyncConsumer runs `async "
            "def` functions, Consumer runs plain ones in threads",
            "invalid_handler",
        )
    if not is_async and is_coroutine_function(function):
        raise InvalidRequest(
            f"the handler {name} is a coroutine function, which Consumer would call and never await: use AsyncConsumer",
            "invalid_handler",
        )
    if is_generator_function(function):
        raise InvalidRequest(
            f"the handler {name} has a `yield`: calling it runs nothing of it, and its messages would count as handled",
            "invalid_handler",
        )
    first = "messages" if in_batches else "message"
    try:
        inspect.signature(function).bind(*((first, "session") if has_session else (first,)))
    except ValueError:
        return None  # some functions written in C do not say what they take
    except TypeError as error:
        reason = (
            f"a consumer with an inbox calls it with ({first}, session)"
            if has_session
            else f"a consumer without an inbox, or with Django's, calls it with ({first}), and a session needs "
            "inbox=Inbox(engine)"
        )
        raise InvalidRequest(f"the handler {name} cannot be called: {error}; {reason}", "invalid_handler") from None
    return reader_of(function, name, in_batches=in_batches)


def refuse_unfinished(result: object) -> None:
    """Raises InvalidRequest where a handler returned work instead of doing it: a lambda or a decorator that calls a
    coroutine function, say. The message would count as handled, and nothing was done."""
    if not (inspect.isawaitable(result) or isinstance(result, Generator | AsyncGenerator)):
        return
    if inspect.iscoroutine(result) or isinstance(result, Generator):
        result.close()
    raise InvalidRequest(
        f"the handler returned a {type(result).__name__}, which nobody runs: the message is not handled; AsyncConsumer "
        "awaits what an `async def` function does, and within it each call of another one needs its `await`",
        "invalid_handler",
    )


class NotTried(Exception):
    """A message is given back, and no attempt counts: `cause` ended the call that it was in, for whatever reason."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__} ended the call of its batch")
        self.cause = cause


async def its_turn(turn: Awaitable[object]) -> None:
    """Wait until a handler may begin. Raises NotTried where the task is cancelled meanwhile."""
    try:
        await turn
    except asyncio.CancelledError as error:
        raise NotTried(error) from None


async def in_a_thread(pool: Executor, function: Callable[..., object], *given: Any) -> None:
    """Call a plain handler. Raises NotTried where the task is cancelled before a thread has begun with it."""
    future = pool.submit(function, *given)
    try:
        await asyncio.wrap_future(future)
    except asyncio.CancelledError as error:
        if future.cancel():
            raise NotTried(error) from None
        raise


def call_to_the_end(function: Callable[..., Any], *given: Any) -> None:
    """Call a plain handler. Raises what it raises, and InvalidRequest where it returned its work undone."""
    try:
        result = function(*given)
    except StopIteration as error:  # no future holds it: the message would never be settled
        raise RuntimeError("the handler raised StopIteration") from error
    refuse_unfinished(result)


def reason_of(error: BaseException, *, named: bool = True) -> str:
    """An error in words that every storage takes: without lone surrogates and NUL, bounded.

    `named`: with its class before the text, and behind it where it was raised, as `(at shop.points.add:41)`. The server
    groups failures by these two.
    """
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its text cannot be had: {type(failed).__name__})"
    place = ""
    if named:
        text = f"{type(error).__name__}: {text}"
        place = place_of(error)
    return _plain(text, REASON_CHARACTERS - len(place)) + place


def _plain(text: str, most: int) -> str:
    text = text[:most].replace("\0", "\\0")
    return text.encode(errors="backslashreplace").decode()[:most]


def place_of(error: BaseException) -> str:
    """Where the handler's own code failed, as ` (at module.function:line)`; empty for an error that was not raised.

    The innermost frame that is neither Python's nor an installed package's; where there is none, because the service
    itself is installed, the first frame outside of this SDK.
    """
    first = own = None
    step: TracebackType | None = error.__traceback__
    for _ in range(MOST_FRAMES):
        if step is None:
            break
        file = step.tb_frame.f_code.co_filename
        if not file.startswith((_SDK, "<frozen")):
            first = first or step
            if not file.startswith(_PYTHON) and not any(folder in file for folder in _INSTALLED):
                own = step
        step = step.tb_next
    shown = own or first
    if shown is None:
        return ""
    module = str(shown.tb_frame.f_globals.get("__name__", "?"))
    name = _plain(f"{module}.{shown.tb_frame.f_code.co_qualname}", PLACE_CHARACTERS)
    return f" (at {name}:{shown.tb_lineno})"


def refuse_offsets(handlers: Iterable[Handler], workers: Sequence[str]) -> None:
    """Raises InvalidRequest for a start at an offset where several `workers` divide the keys: each has its own."""
    for handler in handlers:
        if workers and isinstance(handler.start, int) and handler.start:
            raise InvalidRequest(
                f"start={handler.start} of {handler.topic} is an offset, and each of {', '.join(workers)} has offsets "
                "of its own: give earliest, latest or an instant",
                "names_no_worker",
            )
