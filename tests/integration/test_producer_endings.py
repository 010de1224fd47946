"""Producers that a service forgets to close, and sends that it forgets to await: no message is lost without a word."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from notify.client import AsyncTransactionProducer, Message, create_tables, use_explicit_begin
from notify.errors import BindingRefused
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS

SCRIPT = """
import sys
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from notify.client import Message, TransactionProducer, create_tables, use_explicit_begin

url, topic = sys.argv[1:]
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
def test_a_script_that_ends_without_close_has_sent_its_outcome(
    notify_server: InMemoryServer, unique: str, tmp_path: Path
) -> None:
    """The clock stands still, so that no check can find the outcome instead."""
    notify_server.freeze()
    words = [sys.executable, "-c", SCRIPT, notify_server.url, unique]
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
    notify_server: InMemoryServer, unique: str, tmp_path: Path, way: str
) -> None:
    async def commit_without_it() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        use_explicit_begin(engine)
        async with engine.begin() as connection:
            await connection.run_sync(create_tables)
        try:
            async with AsyncTransactionProducer(notify_server.url, group=unique, engine=engine) as producer:
                await run(producer, engine)
        finally:
            await engine.dispose()

    async def run(producer: AsyncTransactionProducer, engine: Any) -> None:
        forgotten = Message(unique, "forgotten")
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


async def _next_transaction(url: str, group: str, path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}/shop.db")
    use_explicit_begin(engine)
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    async with AsyncTransactionProducer(url, group=group, engine=engine) as producer, AsyncSession(engine) as session:
        await session.begin()
        producer.send(session, Message(group, "forgotten"))  # type: ignore[unused-coroutine]
        await session.rollback()
        await producer.send(session, Message(group, "sent"))
        await session.commit()
    await engine.dispose()


def test_a_rollback_forgets_the_send_that_nobody_awaited(
    notify_server: InMemoryServer, unique: str, tmp_path: Path
) -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        asyncio.run(_next_transaction(notify_server.url, unique, tmp_path))
    assert [message.text for message in notify_server.wait_for(unique, 1)] == ["sent"]
