"""Handlers that end as few do, and what a program has put around them: each message has its own fate all the same."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, Message, ReceivedMessage
from notify.client.handling.hand import TURN_SECONDS
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running, taken_by
from tests.support.queues import LONG_OVER_KAFKA, Queue


class Panic(BaseException):
    """As an extension in Rust raises it, and gevent's Timeout: no Exception, and nothing that ends a process."""


def consume(queue: Queue, unique: str, kind: Any, handle: Callable[[ReceivedMessage], None], **options: Any) -> Any:
    """A consumer of either kind with a handler that is a plain function."""
    consumer = kind(queue.url, group=unique)
    consumer.subscribe(unique, start="earliest", retry_min=0.01, retry_max=0.01, **options)(taken_by(consumer, handle))
    return consumer


@LONG_OVER_KAFKA
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_an_error_that_is_no_exception_is_a_failure(queue: Queue, unique: str, kind: Any) -> None:
    """It ended the consumer, and the next one, which got the message again: PyO3/pyo3#3918."""
    seen: list[tuple[str, int]] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append((message.text, message.attempt))
        if message.text == "panics":
            raise Panic("index out of bounds")
        if message.text == "panics in a task":
            raise BaseExceptionGroup("unhandled errors in a TaskGroup", [Panic("in a task"), ValueError()])

    queue.sender.send(*(Message(unique, text) for text in ("panics", "panics in a task", "good")))
    consumer = consume(queue, unique, kind, handle, max_attempts=2)
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert sorted(seen) == [
        ("good", 1), ("panics", 1), ("panics", 2), ("panics in a task", 1), ("panics in a task", 2),
    ]  # fmt: skip
    assert (consumer.handled, consumer.failed) == (1, 4)


@LONG_OVER_KAFKA
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_an_error_that_is_no_exception_fails_a_batch(queue: Queue, unique: str, kind: Any) -> None:
    handled: list[str] = []

    def handle(messages: Any) -> None:
        if any(message.text == "panics" for message in messages):
            raise Panic("index out of bounds")
        handled.extend(message.text for message in messages)

    queue.sender.send(*(Message(unique, text) for text in ("a", "panics", "b")))
    consumer = consume(queue, unique, kind, handle, max_attempts=1, batch=10)
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert (sorted(handled), consumer.failed) == (["a", "b"], 1)


class Broken(logging.Handler):
    """As a handler that sends each line to a service that is away."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionRefusedError("no log server")


@pytest.fixture
def broken_log() -> Iterator[None]:
    log, handler = logging.getLogger("notify.consumer"), Broken()
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


@LONG_OVER_KAFKA
@pytest.mark.usefixtures("broken_log")
@pytest.mark.parametrize("batch", [None, 10])
def test_a_log_that_fails_holds_up_no_message(queue: Queue, unique: str, batch: int | None) -> None:
    """The messages settled in the same moment stayed in hand for ever: OpenCTI#17553."""

    def handle(given: Any) -> None:
        for message in given if batch else [given]:
            if message.text.startswith("bad"):
                raise ValueError("bad")

    texts = [f"bad {n}" if n % 3 == 0 else f"good {n}" for n in range(30)]
    queue.sender.send(*(Message(unique, text) for text in texts))
    consumer = consume(queue, unique, Consumer, handle, max_attempts=2, batch=batch)
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert (consumer.handled, consumer.failed) == (20, 20)


@LONG_OVER_KAFKA
def test_a_child_that_a_handler_forks_handles_nothing(queue: Queue, unique: str, tmp_path: Path) -> None:
    """The child comes back from the handler, too: it has no loop, and would handle what its parent has in hand."""
    notes, parent, children = tmp_path / "notes", os.getpid(), list[int]()

    def handle(message: ReceivedMessage) -> None:
        with notes.open("a") as noted:
            noted.write(f"{message.text} {os.getpid() == parent}\n")
        if message.text == "forks" and (child := os.fork()):
            children.append(child)

    queue.sender.send(Message(unique, "forks"), *(Message(unique, str(n)) for n in range(5)))
    consumer = Consumer(queue.url, group=unique, concurrency=1)
    consumer.subscribe(unique, start="earliest")(handle)
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
        assert eventually(lambda: ended(children[0]), "the child to end") == [0]
    assert sorted(notes.read_text().splitlines()) == sorted(f"{text} True" for text in ["forks", *map(str, range(5))])


def ended(child: int) -> list[int]:
    """The exit code of a child; empty while it runs."""
    name, status = os.waitpid(child, os.WNOHANG)
    return [os.waitstatus_to_exitcode(status)] if name else []


@LONG_OVER_KAFKA
def test_a_time_limit_that_comes_too_late_ends_the_consumer(queue: Queue, unique: str) -> None:
    """Another thread had raised it, and the handler had returned: one message stayed in hand for ever, or no handler
    was called any more (Bogdanp/dramatiq#445)."""
    seen: list[str] = []

    def late() -> float:
        if len(seen) > 1:  # the second handler has returned
            raise Panic("the time limit")
        return time.perf_counter()

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.text)
        if len(seen) == 1 and (hand := consumer._hand) is not None:
            hand.clock = late
            time.sleep(2 * TURN_SECONDS)  # longer than a caller's turn, so that it looks for the clock again

    queue.sender.send(*(Message(unique, str(n)) for n in range(5)))
    consumer = Consumer(queue.url, group=unique, concurrency=1, lease=1)
    consumer.subscribe(unique, start="earliest")(handle)
    ended: Future[BaseException] = Future()

    def run_to_its_end() -> None:
        try:
            consumer.run(signals=False)
        except BaseException as error:
            ended.set_result(error)

    threading.Thread(target=run_to_its_end, daemon=True).start()
    assert "has raised Panic in a thread of handlers" in str(ended.result(PATIENCE_SECONDS))
    assert len(seen) == 2
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be handled")
    assert set(seen) == set("01234")


@LONG_OVER_KAFKA
@pytest.mark.parametrize("by", ["stop", "cancel"])
def test_a_handler_may_end_its_own_consumer(queue: Queue, unique: str, by: str) -> None:
    seen: list[str] = []

    async def main() -> None:
        consumer = AsyncConsumer(queue.url, group=unique)

        @consumer.subscribe(unique, start="earliest")
        async def handle(message: ReceivedMessage) -> None:
            seen.append(message.text)
            if by == "stop":
                consumer.stop()
            else:
                task.cancel()
            await asyncio.sleep(0)  # a task is cancelled at its next step

        task = asyncio.create_task(consumer.run())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(task, return_exceptions=True)

    queue.sender.send(*(Message(unique, str(n)) for n in range(5)))
    asyncio.run(main())
    first = list(seen)
    other = Consumer(queue.url, group=unique)
    other.subscribe(unique)(lambda message: seen.append(message.text))
    with running(other):
        eventually(lambda: queue.is_settled(unique), "the rest")
    assert first and set(seen) == set("01234")
    if by == "stop":
        assert sorted(seen) == [*"01234"]


@LONG_OVER_KAFKA
def test_a_handler_that_swallows_a_cancellation_changes_nothing_for_the_next(queue: Queue, unique: str) -> None:
    """An older library cancels the task for its time-out, and does not take that back."""
    seen: list[tuple[str, int]] = []

    async def fail() -> None:
        raise ValueError("in a task")

    consumer = AsyncConsumer(queue.url, group=unique, concurrency=1)

    @consumer.subscribe(unique, start="earliest", mode="ordered", retry_min=0.01, max_attempts=2)
    async def handle(message: ReceivedMessage) -> None:
        seen.append((message.text, message.attempt))
        if message.text == "swallows":
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            try:
                await asyncio.sleep(0)  # a task is cancelled at its next step
            except asyncio.CancelledError:
                return
        if message.text == "fails":
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

    queue.sender.send(*(Message(unique, text, key="k") for text in ("swallows", "fails", "good")))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert (consumer.handled, consumer.failed) == (2, 2)
    assert seen == [("swallows", 1), ("fails", 1), ("fails", 2), ("good", 1)]
