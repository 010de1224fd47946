"""Handlers: the functions that a consumer calls, with the options of their subscriptions, and the checks of both."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import linecache
import sysconfig
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import CoroutineType, TracebackType
from typing import Any

from notify.client.handling.typed import Read, reader_of
from notify.errors import DeadLetter, InvalidRequest
from notify.protocol.limits import (
    LIMITS,
    MODES,
    ON_EXHAUSTED,
    OnExhausted,
    check_between,
    check_fair_by,
    check_name,
    check_whole,
    instant_us,
)
from notify.protocol.message import ReceivedMessage, number_of_seconds
from notify.runtime.functions import is_coroutine_function, is_generator_function, name_of

CANCEL_SECONDS = 1.0
"""How long cancelled coroutines may take to end."""
REASON_CHARACTERS = 500
"""The most characters of a handler's error that go to the server with a retry or a dead letter."""
PLACE_CHARACTERS = 150
TRACE_CHARACTERS, TRACE_FRAMES, TRACE_CAUSES = 8_000, 30, 5
"""How much of a traceback goes with them: characters, frames of each error, and errors, those nearest to the end."""
DEATHS = 16
"""The default of `max_deaths`, which older servers do not know."""
MOST_FRAMES = 1000
"""The most frames of a traceback that are examined; a deeper traceback is an endless recursion."""
_SDK = str(Path(__file__).parents[2] / "_")[:-1]
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
    """The most messages in one call, which gets a list; None: the function gets one message."""
    read: Read | None = None
    """Decodes a message for the function; None if the function takes the ReceivedMessage itself."""
    max_deaths: int = DEATHS
    on_exhausted: OnExhausted = "dead_letter"
    fair_by: str = ""

    def handle(self, message: ReceivedMessage, *session: Any) -> Any:
        """Call the function with one message. The result is a coroutine if the function is a coroutine function.

        Raises DeadLetter if the body does not fit the function's annotation.
        """
        return self.call(message if self.read is None else self.read(message), *session)


def handler_of(handlers: Mapping[str, Handler], topic: str) -> Handler | None:
    """The handler that is subscribed to the topic by name, else the first handler whose pattern matches."""
    named = handlers.get(topic)
    return named or next((h for pattern, h in handlers.items() if fnmatchcase(topic, pattern)), None)


def is_cancelled(error: BaseException) -> bool:
    """Whether the error means that the consumer has cancelled the handler's task.

    A CancelledError may also come from within the handler, such as from a task that the handler awaits and that other
    code has cancelled. Then it is an ordinary failure of the handler.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def check_options(
    topic: str,
    mode: str,
    tags: Sequence[str],
    max_attempts: int,
    max_deaths: int,
    retry: tuple[float, float],
    batch: int | None,
    in_hand: int | None,
    on_exhausted: str,
    fair_by: str = "",
) -> None:
    """Raises InvalidRequest for options of a subscription that the server would refuse, or that contradict each other.

    `retry`: the shortest and the longest wait, in seconds. `in_hand`: the most messages that the consumer holds, if the
    user has set it.
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
    if isinstance(tags, str):
        raise InvalidRequest(f"tags is text; it should be a list of tags, such as [{tags[:60]!r}]", "invalid_type")
    for tag in tags:
        check_name("tag", tag)
    check_whole("max_attempts", max_attempts, 1, LIMITS.attempts)
    check_whole("max_deaths", max_deaths, 1, LIMITS.attempts)
    retry_min, retry_max = number_of_seconds("retry_min", retry[0]), number_of_seconds("retry_max", retry[1])
    check_between("retry_min", retry_min, LIMITS.retry_min_seconds, LIMITS.retry_first_seconds)
    check_between("retry_max", retry_max, retry_min, LIMITS.retry_max_seconds)
    if on_exhausted not in ON_EXHAUSTED:
        raise InvalidRequest(f"on_exhausted is {' or '.join(ON_EXHAUSTED)}, not {on_exhausted!r:.40}")
    if on_exhausted == "hold" and mode != "ordered":
        raise InvalidRequest(
            f'on_exhausted="hold" needs mode="ordered", where the messages of a key wait for each other; topic '
            f"{topic!r} has mode {mode}"
        )
    check_fair_by(fair_by, mode)
    if batch is not None:
        check_whole("batch", batch, 1, LIMITS.max_messages)
        if in_hand is not None and batch > in_hand:
            raise InvalidRequest(
                f"a batch of {batch} messages is impossible, because the consumer holds {in_hand} at most: give the "
                f"consumer a batch= of at least {batch}, or none",
                "out_of_bounds",
            )


def check_start(start: object) -> None:
    """Raises InvalidRequest for a start of a subscription that no server knows: it may be asked for one much later."""
    if start is None or start in ("earliest", "latest") or (isinstance(start, int) and not isinstance(start, bool)):
        return
    try:
        moment = datetime.fromisoformat(start) if isinstance(start, str) else start
        if isinstance(moment, datetime):
            instant_us("start", moment)
            return
    except ValueError:
        pass
    raise InvalidRequest(
        f"start {start!r:.40} is not earliest, latest, an offset or an RFC 3339 instant", "invalid_start"
    )


def check_callable(
    function: Callable[..., Any], *, is_async: bool, has_session: bool, in_batches: bool = False
) -> Read | None:
    """Raises InvalidRequest if a consumer of this kind cannot call the function, because every message would fail.

    Returns the function that decodes messages for it, see `reader_of`. `in_batches`: whether it is called with lists.
    """
    name = name_of(function)
    if not callable(function):
        raise InvalidRequest(f"the handler {name} is not a function", "invalid_handler")
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
        return None  # some functions written in C have no signature
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
    """Raises InvalidRequest if a handler returned a coroutine, generator or Future instead of doing its work, such as a
    lambda that calls a coroutine function: the message would count as handled although nothing was done."""
    if result is None:
        return
    if not (inspect.isawaitable(result) or isinstance(result, Generator | AsyncGenerator | concurrent.futures.Future)):
        return
    if inspect.iscoroutine(result) or isinstance(result, Generator):
        result.close()
    raise InvalidRequest(
        f"the handler returned a {type(result).__name__}, which was never awaited: the message is not handled; "
        "AsyncConsumer awaits an `async def` handler, which must `await` each coroutine function that it calls",
        "invalid_handler",
    )


class Partial(DeadLetter, InvalidRequest):
    """The handler has committed its effect, or a part of it, together with the claim. Another attempt would be skipped
    as already handled, even if a part of the effect is missing."""

    code = "inbox_commit"

    def __init__(self, error: BaseException) -> None:
        ended = "" if isinstance(error, InvalidRequest) else f". It ended with {type(error).__name__}: {error}"
        super().__init__(
            "the handler has ended the inbox's transaction itself (COMMIT as SQL, or a statement that commits, such as "
            "DDL on MySQL): a part of its effect may be committed, and the next attempt would count as handled; raise "
            f"what should roll it back, and leave the commit to the inbox{ended}"
        )


class NotTried(Exception):
    """The handler did not get the message: it is given back without using up an attempt. `cause`: the reason, such as
    a SystemExit that ended the call of its batch, or an inbox's database that does not answer."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the handler was not called: {type(cause).__name__}")
        self.cause = cause


class LeaseOver(NotTried):
    """The message's lease ended before its handler began."""

    def __init__(self) -> None:
        super().__init__(TimeoutError("its lease is over"))


class Cancelled(Exception):
    """The handler, a coroutine, was cancelled with its consumer."""


def no_handler(message: ReceivedMessage) -> InvalidRequest:
    """The error of a message of a topic without a handler."""
    return InvalidRequest(f"this consumer has no handler for topic {message.topic!r}; another of its group may")


class _Rest:
    """Awaits the rest of a coroutine that runs in a context of its own, in the task of its caller."""

    __slots__ = ("_awaited", "_context", "_coroutine")

    def __init__(self, context: contextvars.Context, coroutine: Coroutine[Any, Any, Any], awaited: Any) -> None:
        self._context = context
        self._coroutine = coroutine
        self._awaited = awaited
        """The future that the coroutine waits for."""

    def __await__(self) -> Generator[Any, Any, Any]:
        context, coroutine, awaited = self._context, self._coroutine, self._awaited
        while True:
            step: Callable[..., Any] = coroutine.send
            try:
                value = yield awaited
            except BaseException as error:
                step, value = coroutine.throw, error
            try:
                awaited = context.run(step, value)
            except StopIteration as returned:
                return returned.value


async def _result(value: Any) -> Any:
    return value


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def begin_in_own_context(function: Callable[..., Any], *arguments: Any) -> Awaitable[Any] | None:
    """Call a coroutine function, and run its coroutine until it waits. Returns what gives its result when awaited; None
    if it has returned None already.

    It sees the caller's context variables, and the caller does not see its changes, as if it had a task of its own.
    """
    context = contextvars.copy_context()
    coroutine = context.run(function, *arguments)
    if type(coroutine) is not CoroutineType:  # a wrapper may return another awaitable
        coroutine = _awaited(coroutine)
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration as returned:
        return None if returned.value is None else _result(returned.value)
    return _Rest(context, coroutine, awaited)


def call_to_the_end(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a plain handler, and wait for the end of a Future that it returns, such as that of work for a pool of its
    own. Raises the exception of either, and InvalidRequest if it returned a coroutine or generator instead of doing its
    work."""
    try:
        result = function(*arguments)
        while isinstance(result, concurrent.futures.Future):
            result = result.result()
    except StopIteration as error:  # a future cannot hold it: the message would never be settled
        raise RuntimeError("the handler raised StopIteration") from error
    if result is not None:
        refuse_unfinished(result)


def ends_process(error: BaseException) -> bool:
    """Whether a handler wants its process to end: it raised SystemExit or KeyboardInterrupt, perhaps in a group.

    Any other error is a failure of the handler, even if it is no Exception, such as the panic of an extension in Rust
    or gevent's Timeout. If it ended the consumer, its message would end every consumer in turn.
    """
    return any(isinstance(leaf, SystemExit | KeyboardInterrupt) for leaf in leaves_of(error))


def meant_by(error: BaseException) -> BaseException:
    """The DeadLetter if a group of errors has nothing else: a task of the handler's raised it. Otherwise the error."""
    leaves = leaves_of(error)
    return leaves[0] if all(isinstance(leaf, DeadLetter) for leaf in leaves) else error


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors of an ExceptionGroup, such as those of a TaskGroup's tasks, in their order; any other error itself."""
    leaves: list[BaseException] = []
    rest = [error]
    while rest:
        each = rest.pop()
        if isinstance(each, BaseExceptionGroup):
            rest += reversed(each.exceptions)
        else:
            leaves.append(each)
    return leaves


def reason_of(error: BaseException, *, named: bool = True) -> str:
    """The text of an error, bounded, and without the characters that a storage refuses: lone surrogates and NUL.

    `named`: put the error's class before the text, and the place where it was raised behind it, such as
    `(at shop.points.add:41)`. The server groups failures by class and place. For an ExceptionGroup these are its first
    error's: the text of a group says only how many there are.
    """
    first, *others = leaves_of(error)
    text, place = _said_by(first), ""
    if others:
        text += f" (and {len(others)} more of the handler's tasks failed)"
    if named:
        text = f"{type(first).__name__}: {text}"
        place = place_of(first)
    return _plain(text, REASON_CHARACTERS - len(place)) + place


def _said_by(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failed:
        return f"(the text of the error is unavailable: {type(failed).__name__})"


def trace_of(error: BaseException) -> str:
    """The traceback of an error as Python prints it, with its causes, and without the frames of this SDK; bounded: its
    end, where the error is. It has no values of variables.

    Of its causes it has the classes and the frames, and not the texts: libraries write parameters of statements and
    addresses with passwords there, and the service chose only the text of the outermost error.

    Python's own formatting asks for the state of each file and parses each line, every time. When a database is
    unreachable, thousands of messages fail at once, and the consumer's event loop would do nothing else.
    """
    error = leaves_of(error)[0]
    parts: list[str] = []
    step: BaseException | None = error
    while step is not None and len(parts) < 2 * TRACE_CAUSES:
        said = type(step).__name__
        if step is error:
            said = f"{said}: {_said_by(step)}"[:REASON_CHARACTERS]
        parts.append("\n".join(["Traceback (most recent call last):", *_frames_of(step), said]))
        if step.__cause__ is not None:
            parts.append("The above exception was the direct cause of the following exception:")
            step = step.__cause__
        elif step.__context__ is not None and not step.__suppress_context__:
            parts.append("During handling of the above exception, another exception occurred:")
            step = step.__context__
        else:
            step = None
    text = "\n\n".join(reversed(parts))[-TRACE_CHARACTERS:]
    return _plain(text, TRACE_CHARACTERS)


def _frames_of(error: BaseException) -> list[str]:
    """The lines of an error's last frames, each with its place and source."""
    frames: deque[TracebackType] = deque(maxlen=TRACE_FRAMES)
    step = error.__traceback__
    for _ in range(MOST_FRAMES):
        if step is None:
            break
        if not step.tb_frame.f_code.co_filename.startswith(_SDK):
            frames.append(step)
        step = step.tb_next
    lines = []
    for frame in frames:  # Python gives some of them no line number
        code = frame.tb_frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.tb_lineno}, in {code.co_qualname}')
        if source := _source_of(code.co_filename, frame):
            lines.append(f"    {source}")
    return lines


def _source_of(file: str, frame: TracebackType) -> str:
    """The line of source of a frame; empty if it cannot be had: a loader of the program's, which may fail, gives it."""
    with contextlib.suppress(Exception):
        return linecache.getline(file, frame.tb_lineno or 0, frame.tb_frame.f_globals).strip()
    return ""


def _plain(text: str, most: int) -> str:
    text = text[:most].replace("\0", "\\0")
    return text.encode(errors="backslashreplace").decode()[:most]


def is_own_code(file: str) -> bool:
    """Whether a file with code belongs to the service: neither to this SDK, nor to Python or an installed package."""
    is_foreign = file.startswith((_SDK, "<frozen", "<sqlalchemy", *_PYTHON))
    return not is_foreign and not any(folder in file for folder in _INSTALLED)


def place_of(error: BaseException) -> str:
    """Where the handler's own code failed, as ` (at module.function:line)`; empty if the error was never raised.

    This is the innermost frame that belongs neither to Python nor to an installed package. If there is no such frame,
    because the service itself is an installed package, it is the first frame outside of this SDK.
    """
    error = leaves_of(error)[0]
    first_outside = innermost_own = None
    step: TracebackType | None = error.__traceback__
    for _ in range(MOST_FRAMES):
        if step is None:
            break
        file = step.tb_frame.f_code.co_filename
        if not file.startswith((_SDK, "<frozen")):
            first_outside = first_outside or step
            if is_own_code(file):
                innermost_own = step
        step = step.tb_next
    place = innermost_own or first_outside
    if place is None:
        return ""
    module = str(place.tb_frame.f_globals.get("__name__", "?"))
    name = _plain(f"{module}.{place.tb_frame.f_code.co_qualname}", PLACE_CHARACTERS)
    return f" (at {name}:{place.tb_lineno})"


def refuse_offsets(handlers: Iterable[Handler], workers: Sequence[str]) -> None:
    """Raises InvalidRequest for a start at an offset if several `workers` divide the keys: each has its own offsets."""
    for handler in handlers:
        if workers and isinstance(handler.start, int) and handler.start:
            raise InvalidRequest(
                f"start={handler.start} of {handler.topic} is an offset, and each of {', '.join(workers)} has offsets "
                "of its own: give earliest, latest or an instant",
                "names_no_worker",
            )
