"""Producers that a service forgets to close, and sends that it forgets to await: no message is lost without a word."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_session
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from notify.client import (
    AsyncConsumer,
    AsyncReader,
    AsyncTransactionProducer,
    Message,
    ReceivedMessage,
    TransactionProducer,
)
from notify.client.producer.outgoing import ThreadOutgoing
from notify.errors import BindingRefused, Closed, InvalidRequest
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.shop import Base, Order

SCRIPT = """
import sys
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from notify.client import Message, TransactionProducer, create_tables, use_explicit_begin

url, topic, hook = sys.argv[1:]
if hook == "fails":
    sa.event.listen(Session, "after_commit", lambda session: sys.exit(0))
engine = sa.create_engine("sqlite:///shop.db")
use_explicit_begin(engine)
create_tables(engine)
producer = TransactionProducer(url, group=topic, engine=engine)

@producer.transactional(sessionmaker(engine))
def place(session):
    producer.send(session, Message(topic, "placed"))

place()
"""


@pytest.mark.long
@pytest.mark.parametrize("hook", ["none", "fails"])
def test_a_script_that_ends_without_close_has_sent_its_outcome(
    notify_server: InMemoryServer, unique: str, tmp_path: Path, hook: str
) -> None:
    """The clock stands still, so that no check can find the outcome instead. A hook of the service that ran first, and
    failed, left the outcome to a check."""
    notify_server.freeze()
    words = [sys.executable, "-c", SCRIPT, notify_server.url, unique, hook]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    assert [message.text for message in notify_server.messages(unique)] == ["placed"]


FORGOTTEN = """
import asyncio, sys
from notify.client import AsyncTransactionProducer, Message

url, topic, way = sys.argv[1:]
kept = []

async def main():
    producer = AsyncTransactionProducer(url, group=topic)
    await producer.publish(Message(topic, "x"))
    if way == "closed":
        await producer.close()
    if way != "collected":
        kept.append(producer)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize(("way", "times"), [("kept", 1), ("collected", 1), ("closed", 0)])
def test_an_asynchronous_producer_that_is_never_closed_is_said(
    notify_server: InMemoryServer, unique: str, way: str, times: int
) -> None:
    """Its last outcomes were left to check-back without a word."""
    words = [sys.executable, "-c", FORGOTTEN, notify_server.url, unique, way]
    done = subprocess.run(words, check=True, timeout=PATIENCE_SECONDS, capture_output=True, text=True)
    assert done.stderr.count(f"AsyncTransactionProducer of group '{unique}' was never closed") == times, done.stderr
    assert done.stderr.count("await producer.close()") == times


@pytest.mark.parametrize("way", ["send", "session handle", "connection handle"])
def test_a_send_that_nobody_awaits_refuses_the_commit(
    notify_server: InMemoryServer, unique: str, async_engine: AsyncEngine, way: str
) -> None:
    async def commit_without_it() -> None:
        forgotten, engine = Message(unique, "forgotten"), async_engine
        async with AsyncTransactionProducer(notify_server.url, group=unique, engine=engine) as producer:
            if way == "send":
                async with AsyncSession(engine) as session, session.begin():
                    producer.send(session, forgotten)  # type: ignore[unused-coroutine]
            elif way == "session handle":
                async with AsyncSession(engine) as session, producer.transaction(session) as tx:
                    tx.send(forgotten)  # type: ignore[unused-coroutine]
            else:
                async with engine.connect() as connection, producer.transaction(connection) as tx:
                    tx.send(forgotten)  # type: ignore[unused-coroutine]

    with pytest.warns(RuntimeWarning, match="never awaited"), pytest.raises(BindingRefused, match=r"await .*send"):
        asyncio.run(commit_without_it())
    assert notify_server.halves(unique) == []


@pytest.mark.parametrize("way", ["kept", "task", "in its flush", "before its flush", "savepoint"])
def test_a_send_that_has_not_ended_refuses_the_commit(
    notify_server: InMemoryServer, unique: str, async_engine: AsyncEngine, way: str
) -> None:
    """Changes were committed without the message, with at most a warning."""

    async def commit_without_it() -> None:
        kept: list[Any] = []
        async with (
            AsyncTransactionProducer(notify_server.url, group=unique, engine=async_engine) as producer,
            AsyncSession(async_engine) as session,
        ):

            def send(*given: Any) -> None:
                kept.append(producer.send(session, Message(unique, "late")))

            try:
                if way == "in its flush":
                    event.listen(session.sync_session, "after_flush", send)
                elif way == "before its flush":
                    event.listen(session.sync_session, "before_commit", send)
                    await session.connection()
                elif way == "savepoint":
                    async with session.begin_nested():
                        send()
                else:
                    send()
                if way == "task":
                    kept[0] = asyncio.ensure_future(kept[0])
                session.add(Order(item=way))
                await session.commit()
            finally:
                for sending in kept:
                    sending.cancel() if way == "task" else sending.close()

    async def left() -> list[str]:
        async with AsyncSession(async_engine) as session:
            await session.run_sync(lambda bound: Base.metadata.create_all(bound.connection()))
            await session.commit()
            with pytest.raises(BindingRefused, match=r"await .*send"):
                await commit_without_it()
            return list(await session.scalars(sa.select(Order.item)))

    assert asyncio.run(left()) == []
    assert notify_server.halves(unique) == notify_server.messages(unique) == []


def test_sends_that_are_awaited_together_or_in_a_hook(
    notify_server: InMemoryServer, unique: str, async_engine: AsyncEngine
) -> None:
    async def send_all() -> None:
        async with (
            AsyncTransactionProducer(notify_server.url, group=unique, engine=async_engine) as producer,
            AsyncSession(async_engine) as session,
        ):

            def send_in_hook(bound: Session) -> None:
                await_only(producer.send(async_session(bound), Message(unique, "hook")))

            event.listen(session.sync_session, "before_commit", send_in_hook, once=True)
            await session.connection()
            with pytest.raises(BindingRefused, match="await_only"):
                await producer.send(session.sync_session, Message(unique, "hook"))
            kept = producer.send(session, Message(unique, "kept"))
            await session.flush()
            await kept
            await asyncio.gather(producer.send(session, Message(unique, "gathered")))
            with pytest.raises(InvalidRequest):
                await producer.send(session, Message(unique, object()))
            await session.commit()

    asyncio.run(send_all())
    assert [message.text for message in notify_server.wait_for(unique, 3)] == ["kept", "gathered", "hook"]


def test_a_rollback_forgets_the_send_that_nobody_awaited(
    notify_server: InMemoryServer, unique: str, async_engine: AsyncEngine
) -> None:
    async def next_transaction() -> None:
        async with (
            AsyncTransactionProducer(notify_server.url, group=unique, engine=async_engine) as producer,
            AsyncSession(async_engine) as session,
        ):
            await session.begin()
            producer.send(session, Message(unique, "forgotten"))  # type: ignore[unused-coroutine]
            await session.rollback()
            await producer.send(session, Message(unique, "sent"))
            await session.commit()

    with pytest.warns(RuntimeWarning, match="never awaited"):
        asyncio.run(next_transaction())
    assert [message.text for message in notify_server.wait_for(unique, 1)] == ["sent"]


# --- event loops that come and go, as in a script or a task that calls asyncio.run --------------------------------


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
    entered = producer.__aenter__(), reader.__aenter__()  # else the end of `async with` hid the sentence of a reader
    for use in (*entered, producer.start(), producer.publish(Message("t", "x")), consumer.run(), reader.shards()):
        with pytest.raises(BindingRefused, match=r"no event loop of asyncio runs here"):
            use.send(None)


async def _handle(message: object) -> None:
    """Do nothing."""


def test_a_producer_that_is_closed_while_it_starts_leaves_no_thread(
    memory: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close found nothing to close, and the thread that another one had begun to start stayed."""
    is_starting, may_start = threading.Event(), threading.Event()
    make = ThreadOutgoing._make

    async def slowly(outgoing: ThreadOutgoing) -> Any:
        is_starting.set()
        assert may_start.wait(PATIENCE_SECONDS)
        return await make(outgoing)

    monkeypatch.setattr(ThreadOutgoing, "_make", slowly)
    producer = TransactionProducer(memory.url, group=unique)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(producer.publish, Message(unique, "late"))
        assert is_starting.wait(PATIENCE_SECONDS)
        closing = pool.submit(producer.close)
        eventually(lambda: producer.outgoing.is_closed, "the close to begin")
        may_start.set()
        closing.result(PATIENCE_SECONDS)
        with contextlib.suppress(Closed):
            publishing.result(PATIENCE_SECONDS)
    assert not [thread for thread in threading.enumerate() if thread.name == f"notify-producer-{unique}"]


# --- a scope of anyio, in which every wait is cancelled ------------------------------------------------------------


async def nothing_is_left() -> None:
    """Wait until no task of the SDK runs any more."""
    await eventually_async(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "the tasks to end")


def test_a_producer_that_is_closed_in_a_cancelled_scope_leaves_no_task(
    notify_server: InMemoryServer, async_engine: AsyncEngine, unique: str
) -> None:
    """Its connections stayed open, and it went on to ask for the servers as long as the process ran."""

    async def run() -> None:
        producer = AsyncTransactionProducer(notify_server.url, group=unique, engine=async_engine)
        await producer.publish(Message(unique, "sent"))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await producer.close()
        assert scope.cancelled_caught
        await nothing_is_left()
        await async_engine.dispose()

    asyncio.run(run())


def test_a_consumer_in_a_scope_that_is_cancelled_leaves_no_task(notify_server: InMemoryServer, unique: str) -> None:
    """It renewed the leases of what it held as long as the process ran, and its handler was not cancelled."""
    has_begun = asyncio.Event()
    consumer = AsyncConsumer(notify_server.url, group=unique)

    @consumer.subscribe(unique, start="earliest")
    async def handle(message: ReceivedMessage) -> None:
        has_begun.set()
        await asyncio.sleep(PATIENCE_SECONDS)  # until it is cancelled

    async def run() -> None:
        async with AsyncTransactionProducer(notify_server.url, group=unique) as producer:
            await producer.publish(Message(unique, "sent"))
        async with anyio.create_task_group() as group:
            group.start_soon(consumer.run)
            await has_begun.wait()
            group.cancel_scope.cancel()
        await nothing_is_left()

    asyncio.run(run())
