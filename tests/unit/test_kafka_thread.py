"""Threads that ask Kafka's brokers: how many requests wait, nobody waits for brokers away, and how a thread ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from notify.errors import Unavailable
from tests.support.clock import PATIENCE_SECONDS

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException

from notify.kafka.client_thread import ClientThread
from notify.kafka.cluster import Cluster
from notify.server.groups.kafka.thread import WAITING, BrokersThread

NOBODY = Cluster.of("kafka://127.0.0.1:9")


def run(test: Callable[[BrokersThread], Awaitable[None]]) -> None:
    async def with_thread() -> None:
        thread = BrokersThread(NOBODY)
        try:
            await test(thread)
        finally:
            await thread.close(lambda: None)

    asyncio.run(with_thread())


def test_brokers_that_do_not_answer_are_not_asked_again_at_once() -> None:
    asked: list[int] = []

    def too_slow() -> None:
        asked.append(1)
        raise TimeoutError

    async def test(thread: BrokersThread) -> None:
        for _ in range(3):
            with pytest.raises(Unavailable, match="does not answer"):
                await thread.call(too_slow)
        assert asked == [1]

    run(test)


def test_a_refusal_of_one_thing_refuses_nothing_else() -> None:
    def refused() -> None:
        raise KafkaException(KafkaError(KafkaError.INVALID_REQUEST))

    async def test(thread: BrokersThread) -> None:
        with pytest.raises(Unavailable):
            await thread.call(refused)
        assert await thread.call(lambda: 7) == 7

    run(test)


def test_no_more_than_so_many_requests_wait() -> None:
    async def test(thread: BrokersThread) -> None:
        go_on = threading.Event()
        waiting = [asyncio.ensure_future(thread.call(lambda: go_on.wait(PATIENCE_SECONDS))) for _ in range(WAITING)]
        await asyncio.sleep(0)  # each of them has asked
        with pytest.raises(Unavailable, match="wait for Kafka already"):
            await thread.call(lambda: None)
        go_on.set()
        assert all(await asyncio.gather(*waiting))

    run(test)


def test_a_request_that_waited_too_long_is_answered_and_never_begun() -> None:
    begun: list[int] = []

    async def test(thread: BrokersThread) -> None:
        go_on = threading.Event()
        first = asyncio.ensure_future(thread.call(lambda: go_on.wait(PATIENCE_SECONDS)))
        await asyncio.sleep(0)  # it has the thread
        with pytest.raises(Unavailable, match="too slowly"):
            await thread.call(lambda: begun.append(1), seconds=0)
        go_on.set()
        assert await first
        assert await thread.call(lambda: 7) == 7
        assert begun == []

    run(test)


def test_a_change_that_another_server_ends_may_be_tried_again() -> None:
    def fenced() -> None:
        raise KafkaException(KafkaError(KafkaError._FENCED))

    async def test(thread: BrokersThread) -> None:
        with pytest.raises(Unavailable, match="another server"):
            await thread.call(fenced)

    run(test)


async def test_a_thread_that_was_closed_refuses_calls() -> None:
    thread = BrokersThread(NOBODY)
    await thread.close(lambda: None)
    with pytest.raises(Unavailable, match="stopping"):
        await thread.call(lambda: None)


async def test_a_client_that_hangs_does_not_keep_the_server_from_stopping() -> None:
    thread = BrokersThread(NOBODY)
    begun, go_on, made = threading.Event(), threading.Event(), []

    def hangs() -> None:
        begun.set()
        go_on.wait(PATIENCE_SECONDS)

    running = asyncio.ensure_future(thread.call(hangs))
    await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    waiting = asyncio.ensure_future(thread.call(lambda: made.append("waiting")))
    await asyncio.sleep(0)  # it has asked
    await thread.close(lambda: made.append("closed"), seconds=0.01)
    assert not running.done()
    go_on.set()
    await running
    with pytest.raises(Unavailable, match="stopping"):
        await waiting
    assert "waiting" not in made


# --- the thread of one Kafka client: it ends with a last call, also where nobody waits for that any more ------------


async def nothing() -> None:
    pass


def test_a_last_call_is_made_though_nobody_waits_for_it_any_more() -> None:
    busy, is_free, is_over = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        busy.set()
        assert is_free.wait(PATIENCE_SECONDS)

    async def test() -> None:
        thread = ClientThread("test")
        calling = asyncio.ensure_future(thread.call(call))
        assert await asyncio.to_thread(busy.wait, PATIENCE_SECONDS)
        calling.cancel()
        await thread.end(is_over.set, 0.01)
        assert not is_over.is_set()

    asyncio.run(test())
    is_free.set()
    assert is_over.wait(PATIENCE_SECONDS)


def test_a_client_that_calls_back_when_its_loop_is_closed_leaves_nothing_behind() -> None:
    """The coroutine was never awaited, which is a warning."""
    failed: list[RuntimeError] = []
    called, is_closed, is_over = threading.Event(), threading.Event(), threading.Event()

    async def test() -> None:
        thread = ClientThread("test")

        def call_back() -> None:
            called.set()
            assert is_closed.wait(PATIENCE_SECONDS)
            try:
                thread.wait_for(nothing())
            except RuntimeError as error:
                failed.append(error)
            is_over.set()

        await thread.end(call_back, 0.01)
        assert await asyncio.to_thread(called.wait, PATIENCE_SECONDS)

    asyncio.run(test())
    is_closed.set()
    assert is_over.wait(PATIENCE_SECONDS)
    assert failed
