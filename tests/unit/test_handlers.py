"""A consumer checks what it is given in that call: the handler's kind, bounds, and the reason of an error."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from notify.client import AsyncConsumer, Consumer, Inbox, Reader
from notify.client.handling.handlers import (
    REASON_CHARACTERS,
    TRACE_CHARACTERS,
    call_to_the_end,
    meant_by,
    reason_of,
    refuse_unfinished,
    trace_of,
)
from notify.errors import DeadLetter, InvalidRequest
from tests.support.callables import Awaited, async_generator, coroutine, generator, plain, wrapping_a_coroutine
from tests.support.clock import PATIENCE_SECONDS

URL = "http://127.0.0.1:9"


def plain_with_session(message: Any, session: Any) -> None: ...


async def coroutine_with_session(message: Any, session: Any) -> None: ...


class Callable_:
    def __call__(self, message: Any) -> None: ...


def with_default(message: Any, session: Any = None) -> None: ...


def with_any(*arguments: Any) -> None: ...


def consumer_of(kind: str) -> Consumer | AsyncConsumer:
    is_async, has_inbox = kind.startswith("async"), kind.endswith("inbox")
    engine = create_async_engine("sqlite+aiosqlite://") if is_async else sa.create_engine("sqlite://")
    inbox = Inbox(engine) if has_inbox else None
    return (AsyncConsumer if is_async else Consumer)(URL, group="g", inbox=inbox)


@pytest.mark.parametrize(
    ("kind", "function", "said"),
    [
        ("sync", coroutine, "use AsyncConsumer"),
        ("sync", Awaited(), "use AsyncConsumer"),
        ("sync", functools.partial(coroutine), "use AsyncConsumer"),
        ("async", plain, "plain function"),
        ("async", Callable_(), "plain function"),
        ("sync", plain_with_session, "needs inbox="),
        ("async", coroutine_with_session, "needs inbox="),
        ("sync inbox", plain, r"\(message, session\)"),
        ("async inbox", coroutine, r"\(message, session\)"),
        ("sync", lambda: None, "cannot be called"),
        ("sync", "plain", "not a function"),
        ("sync", generator, "`yield`"),
        ("sync", functools.partial(generator), "`yield`"),
        ("sync", async_generator, "`yield`"),
        ("async", async_generator, "plain function"),
    ],
)
def test_a_handler_of_the_wrong_kind_is_refused(kind: str, function: Callable[..., Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        consumer_of(kind).subscribe("t")(function)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("sync", plain),
        ("sync", Callable_()),
        ("sync", print),
        ("sync", with_default),
        ("sync", with_any),
        ("sync", functools.partial(plain_with_session, session=None)),
        ("sync inbox", plain_with_session),
        ("sync inbox", with_default),
        ("async", coroutine),
        ("async", Awaited()),
        ("async", functools.partial(coroutine)),
        ("async", wrapping_a_coroutine),
        ("async inbox", coroutine_with_session),
    ],
)
def test_a_handler_that_can_be_called_is_taken(kind: str, function: Callable[..., Any]) -> None:
    assert consumer_of(kind).subscribe("t")(function) is function


@pytest.mark.parametrize(
    "options",
    [
        {"tags": ["no tag"]},
        {"tags": "vip"},  # it was taken for the tags v, i and p, and the group skipped all messages with the tag vip
        {"max_attempts": 0},
        {"max_attempts": 1.5},
        {"retry_min": 0},
        {"retry_min": "1"},
        {"retry_max": timedelta(minutes=5)},
        {"retry_min": 2, "retry_max": 1},
        {"retry_max": float("nan")},
        {"mode": "orderd"},
        {"batch": 0},
        {"batch": 10_001},
        {"batch": 2.5},
        {"batch": True},
    ],
)
def test_a_subscription_beyond_a_bound_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        consumer_of("sync").subscribe("t", **options)


def test_a_batch_is_no_larger_than_what_the_consumer_holds() -> None:
    with pytest.raises(InvalidRequest, match="at least 500"):
        Consumer(URL, group="g", batch=100).subscribe("t", batch=500)
    Consumer(URL, group="g", batch=500).subscribe("t", batch=500)


@pytest.mark.parametrize(
    ("kind", "function", "said"),
    [
        ("sync", plain_with_session, r"\(messages\), and a session needs inbox="),
        ("async inbox", coroutine, r"\(messages, session\)"),
        ("async", plain, "plain function"),
    ],
)
def test_a_handler_of_batches_of_the_wrong_kind_is_refused(kind: str, function: Callable[..., Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        consumer_of(kind).subscribe("t", batch=10)(function)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0}, {"batch": 10_001}, {"batch": 2.5}, {"concurrency": 2.5}, {"concurrency": True},
        {"drain": -1}, {"lease": 0.5}, {"concurrency": 0}, {"instance": ""},
        {"instance": "x" * 256}, {"instance": "a\nb"}, {"instance": "\udcff"}, {"instance": 7},
        {"lease": "30"}, {"lease": timedelta(seconds=30)}, {"drain": None},
    ],
)  # fmt: skip
def test_a_consumer_beyond_a_bound_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Consumer(URL, group="g", **options)


def test_an_inbox_that_is_given_an_age_that_is_no_number_refuses_it() -> None:
    with pytest.raises(InvalidRequest, match="total_seconds"):
        Inbox(sa.create_engine("sqlite://"), purge_after=timedelta(days=30))  # type: ignore[arg-type]


def test_a_reader_of_half_a_message_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="whole number"):
        Reader(URL, batch=2.5)  # type: ignore[arg-type]


def test_no_future_holds_stop_iteration() -> None:
    """A thread's future cannot hand it on: nobody would hear that the handler has failed."""
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        call_to_the_end(lambda message: next(iter(())), "a message")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("good"), "ValueError: good"),
        (ValueError("a\udcffb\0c"), r"ValueError: a\udcffb\0c"),
        (Mute(), "Mute: (the text of the error is unavailable: RuntimeError)"),
    ],
)
def test_the_words_of_an_error_can_be_stored_anywhere(error: Exception, words: str) -> None:
    assert reason_of(error) == words


def test_the_words_of_an_error_are_bounded() -> None:
    assert len(reason_of(ValueError("\udcff" * 10_000))) == REASON_CHARACTERS


def raised(call: Any) -> Exception:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def parse(text: str) -> Any:
    return json.loads(text)


def dive(depth: int) -> None:
    dive(depth + 1)


def test_a_reason_says_where_the_services_own_code_failed() -> None:
    """Not the line of the library that raised: the function that called it."""
    line = parse.__code__.co_firstlineno + 1
    assert reason_of(raised(lambda: parse("{"))).endswith(f" (at {__name__}.parse:{line})")
    assert f" (at {__name__}.dive:" in reason_of(raised(lambda: dive(0)))


def test_a_service_that_is_installed_has_a_place_too() -> None:
    spaces: dict[str, Any] = {"__name__": "shop.points"}
    source = "def add():\n    raise ValueError('no')"
    exec(compile(source, "/venv/lib/python3/site-packages/shop/points.py", "exec"), spaces)
    assert reason_of(raised(lambda: parse("{"))).count("(at ") == 1
    error = raised(spaces["add"])
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
    assert reason_of(error) == "ValueError: no (at shop.points.add:2)"


def test_a_long_text_leaves_room_for_the_place() -> None:
    def fail() -> None:
        raise ValueError("x" * 10_000)

    reason = reason_of(raised(fail))
    assert len(reason) == REASON_CHARACTERS and "(at " in reason and reason.endswith(")")


def test_a_trace_has_the_services_frames_with_their_source_and_the_causes() -> None:
    def pay() -> None:
        try:
            parse("{")
        except ValueError as error:
            raise RuntimeError("the bank is closed") from error

    lines = trace_of(raised(pay)).splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "RuntimeError: the bank is closed"
    assert "The above exception was the direct cause of the following exception:" in lines
    place = lines.index(f'  File "{__file__}", line {parse.__code__.co_firstlineno + 1}, in parse')
    assert lines[place + 1] == "    return json.loads(text)"
    assert f"{Path('notify', 'client', 'handling')}" not in trace_of(raised(lambda: call_to_the_end(parse, "{")))


def in_a_task_group(*raising: Callable[[], object]) -> BaseException:
    async def call(function: Callable[[], object]) -> None:
        function()

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            for function in raising:
                tasks.create_task(call(function))

    return raised(lambda: asyncio.run(group()))


def test_a_group_of_errors_has_the_reason_and_the_trace_of_its_first_one() -> None:
    """The text of a group is "unhandled errors in a TaskGroup (1 sub-exception)", whatever failed."""
    line = parse.__code__.co_firstlineno + 1
    for count, more in ((1, ""), (3, " (and 2 more of the handler's tasks failed)")):
        error = in_a_task_group(*[lambda: parse("{")] * count)
        assert isinstance(error, ExceptionGroup)
        reason = reason_of(error)
        assert reason.startswith("JSONDecodeError: Expecting property name")
        assert reason.endswith(f"{more} (at {__name__}.parse:{line})")
        trace = trace_of(error)
        assert f'  File "{__file__}", line {line}, in parse' in trace and "JSONDecodeError: Expecting" in trace
    nested = ExceptionGroup("a", [ExceptionGroup("b", [ValueError("no")]), KeyError("k")])
    assert reason_of(nested) == "ValueError: no (and 1 more of the handler's tasks failed)"


def test_a_group_of_dead_letters_alone_is_a_dead_letter() -> None:
    def give_up() -> None:
        raise DeadLetter("an order without an item")

    assert str(meant_by(in_a_task_group(give_up, give_up))) == "an order without an item"
    mixed = in_a_task_group(give_up, lambda: parse("{"))
    assert meant_by(mixed) is mixed
    plain_error = ValueError("no")
    assert meant_by(plain_error) is plain_error


def test_a_future_that_a_plain_handler_returns_is_waited_for() -> None:
    """Its message counted as handled before the work was done, and also when the work failed."""
    is_done = threading.Event()

    def work() -> None:
        assert is_done.wait(PATIENCE_SECONDS)
        raise ValueError("the bank is closed")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        called = pool.submit(call_to_the_end, lambda: pool.submit(work))
        assert not concurrent.futures.wait([called], 0.05).done
        is_done.set()
        assert str(called.exception(PATIENCE_SECONDS)) == "the bank is closed"
    with pytest.raises(InvalidRequest, match="a Future, which was never awaited"):
        refuse_unfinished(concurrent.futures.Future())


def test_a_trace_may_have_a_frame_without_a_line_number() -> None:
    def fail() -> None:
        raise ValueError("no")

    fail.__code__ = fail.__code__.replace(co_linetable=b"")
    assert trace_of(raised(fail)).splitlines()[-1] == "ValueError: no"


def test_a_trace_has_no_texts_of_causes() -> None:
    def connect() -> None:
        try:
            raise ValueError("no route to mysql://shop:secret@db")
        except ValueError as error:
            try:
                raise KeyError("secret") from error
            except KeyError:
                raise RuntimeError("the bank is closed")  # noqa: B904

    lines = trace_of(raised(connect)).splitlines()
    assert {"ValueError", "KeyError", "RuntimeError: the bank is closed"} <= set(lines)
    assert not [line for line in lines if "secret" in line and not line.startswith("    raise")]


def test_a_trace_is_bounded() -> None:
    def fail(depth: int) -> None:
        try:
            raise ValueError("\udcff" * 10_000)
        except ValueError:
            if depth:
                fail(depth - 1)
            raise

    assert len(trace_of(raised(lambda: fail(50)))) <= TRACE_CHARACTERS
    trace = trace_of(raised(lambda: dive(0)))
    assert len(trace) <= TRACE_CHARACTERS and trace.splitlines()[-1].startswith("RecursionError")


def test_the_words_of_a_dead_letter_stay_as_they_are() -> None:
    def fail() -> None:
        raise ValueError("no such customer")

    assert reason_of(raised(fail), named=False) == "no such customer"


@pytest.mark.parametrize("start", ["first", True, 1.5, "2026-01-31T12:00:00", b"latest", "10"])
def test_a_start_that_no_server_knows_is_refused_in_the_call(start: Any) -> None:
    """`start="first"` was taken, and refused only when the consumer ran; where it had subscribed before, never."""
    with pytest.raises(InvalidRequest, match="start"):
        Consumer(URL, group="g").subscribe("t", start=start)


@pytest.mark.parametrize("start", [None, "latest", "earliest", 0, 7, "2026-01-31T12:00:00Z", datetime.now(UTC)])
def test_a_start_that_servers_know_is_taken(start: Any) -> None:
    Consumer(URL, group="g").subscribe("t", start=start)(plain)
