"""The thread of one Kafka client: it ends with a last call, also where nobody waits for that any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.clock import PATIENCE_SECONDS

pytest.importorskip("confluent_kafka")

from notify.kafka.client_thread import ClientThread


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
