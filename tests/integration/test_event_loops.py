"""An AsyncTransactionProducer and event loops that come and go, as in a script or a task that calls asyncio.run."""

from __future__ import annotations

import asyncio
import threading

import pytest

from notify.client import AsyncConsumer, AsyncReader, AsyncTransactionProducer, Message
from notify.errors import BindingRefused
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS


def test_a_producer_goes_on_in_the_next_event_loop(memory: InMemoryServer, unique: str) -> None:
    producer = AsyncTransactionProducer(memory.url, group=unique)
    asyncio.run(producer.start())

    async def go_on() -> None:
        with pytest.warns(ResourceWarning, match="never closed"):
            await producer.publish(Message(unique, "sent"))
        await producer.close()

    asyncio.run(go_on())
    assert [message.text for message in memory.messages(unique)] == ["sent"]


def test_a_close_in_a_later_event_loop_says_what_it_left_behind(memory: InMemoryServer, unique: str) -> None:
    producer = AsyncTransactionProducer(memory.url, group=unique)
    asyncio.run(producer.start())
    with pytest.warns(ResourceWarning, match="never closed"):
        asyncio.run(producer.close())


def test_a_close_from_another_loop_is_refused_and_closes_nothing(memory: InMemoryServer, unique: str) -> None:
    async def use() -> None:
        async with producer:
            with pytest.raises(BindingRefused, match="another event loop"):
                await asyncio.to_thread(asyncio.run, producer.close())
            await producer.publish(Message(unique, "here"))

    producer = AsyncTransactionProducer(memory.url, group=unique)
    asyncio.run(use())
    assert [message.text for message in memory.messages(unique)] == ["here"]


def test_a_producer_of_another_loop_that_runs_is_refused(memory: InMemoryServer, unique: str) -> None:
    refused: list[str] = []

    def elsewhere() -> None:
        with pytest.raises(BindingRefused) as error:
            asyncio.run(producer.publish(Message(unique, "elsewhere")))
        refused.append(str(error.value))

    async def use() -> None:
        async with producer:
            await producer.publish(Message(unique, "here"))
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(PATIENCE_SECONDS)
            await producer.publish(Message(unique, "here again"))

    producer = AsyncTransactionProducer(memory.url, group=unique)
    asyncio.run(use())
    assert "another event loop" in refused[0]
    assert [message.text for message in memory.messages(unique)] == ["here", "here again"]


def test_coroutines_without_asyncio_are_refused_in_one_sentence() -> None:
    """Under trio no loop of asyncio runs: the error was asyncio's own."""
    producer = AsyncTransactionProducer("http://127.0.0.1:1", group="g")
    consumer = AsyncConsumer("http://127.0.0.1:1", group="g")
    consumer.subscribe("t")(_handle)
    reader = AsyncReader(producer.url)
    for use in (producer.start(), producer.publish(Message("t", "x")), consumer.run(), reader.shards()):
        with pytest.raises(BindingRefused, match=r"no event loop of asyncio runs here"):
            use.send(None)


async def _handle(message: object) -> None:
    """Do nothing."""
