"""`flush` and `wait_for_outcome`: a process that is frozen or ends right after its commit leaves nothing in doubt."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from notify.client import AsyncTransactionProducer, Message, TransactionProducer
from notify.client.producer.running import is_taken
from notify.errors import InvalidRequest
from notify.protocol.wire import Item
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import post

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(sqlite_engine: sa.Engine) -> sa.Engine:
    return sqlite_engine


def commit(producer: TransactionProducer, engine: sa.Engine, topic: str, *bodies: str) -> None:
    for body in bodies:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(topic, body))


def bodies(server: InMemoryServer, topic: str) -> list[str]:
    return [message.text for message in server.messages(topic)]


def test_flushed_messages_are_stored(frozen: InMemoryServer, engine: sa.Engine, unique: str) -> None:
    with TransactionProducer(frozen.url, group=unique, engine=engine) as producer:
        assert producer.flush() == []
        for number in range(5):
            commit(producer, engine, unique, str(number))
            assert producer.flush(PATIENCE_SECONDS) == []
            assert len(bodies(frozen, unique)) == number + 1
        for wrong in (-1, "soon", float("nan")):
            with pytest.raises(InvalidRequest):
                producer.flush(wrong)  # type: ignore[arg-type]
    assert producer.flush() == []


def test_flush_names_unsent_messages_and_sends_them_later(
    frozen: InMemoryServer, engine: sa.Engine, unique: str
) -> None:
    with TransactionProducer(frozen.url, group=unique, engine=engine) as producer:
        commit(producer, engine, unique, "before")
        assert producer.flush(PATIENCE_SECONDS) == []
        with frozen.losing_outcomes():
            commit(producer, engine, unique, "lost")
            (half,) = [half for half in frozen.halves(unique) if half.text == "lost"]
            assert producer.flush(0.2) == [half.id.partition(".")[0]]
        frozen._app.faults._lost.clear()
        assert producer.flush(PATIENCE_SECONDS) == []
        assert sorted(bodies(frozen, unique)) == ["before", "lost"]


def test_a_commit_waits_for_its_outcome(frozen: InMemoryServer, engine: sa.Engine, unique: str) -> None:
    with TransactionProducer(frozen.url, group=unique, engine=engine, wait_for_outcome=True) as producer:
        for number in range(5):
            commit(producer, engine, unique, str(number))
            assert len(bodies(frozen, unique)) == number + 1
        with engine.connect() as connection:
            with producer.transaction(connection) as transaction:
                transaction.send(Message(unique, "by a connection"))
            assert "by a connection" in bodies(frozen, unique)


def test_a_commit_whose_outcome_is_not_stored_succeeds_and_says_so(
    frozen: InMemoryServer, engine: sa.Engine, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TransactionProducer(
        frozen.url, group=unique, engine=engine, wait_for_outcome=True, half_timeout=0.5
    ) as producer:
        commit(producer, engine, unique, "before")
        with frozen.losing_outcomes(), caplog.at_level(logging.WARNING, "notify.client"):
            commit(producer, engine, unique, "lost")
        assert "is not stored yet, a check will find it: no answer within 0.5 s" in caplog.text
        frozen._app.faults._lost.clear()
        assert producer.flush(PATIENCE_SECONDS) == []
    assert sorted(bodies(frozen, unique)) == ["before", "lost"]


def rolls_back(server: InMemoryServer, group: str) -> None:
    """As an operator or another program does to a transaction that is just committing."""
    (half,) = [half for half in server.halves(group) if half.state == "PREPARED"]
    outcome = {"id": half.id.partition(".")[0], "outcome": "ROLLBACK"}
    post(server.url, "/v1/transactions/outcomes", {"producer_group": group, "outcomes": [outcome]})


@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        pytest.param(lambda server, _: server.forget(), "does not know it any more", id="lost data"),
        pytest.param(rolls_back, "ROLLED_BACK is already recorded", id="rolled back"),
    ],
)
@pytest.mark.parametrize("waits", [False, True], ids=["flush", "wait_for_outcome"])
def test_a_commit_that_the_server_refuses_is_logged_as_an_error(
    frozen: InMemoryServer,
    engine: sa.Engine,
    unique: str,
    caplog: pytest.LogCaptureFixture,
    waits: bool,
    meanwhile: Callable[[InMemoryServer, str], object],
    why: str,
) -> None:
    with TransactionProducer(frozen.url, group=unique, engine=engine, wait_for_outcome=waits) as producer:
        commit(producer, engine, unique, "before")
        assert producer.flush(PATIENCE_SECONDS) == []
        sa.event.listen(engine, "commit", lambda _: meanwhile(frozen, unique), once=True)
        with caplog.at_level(logging.WARNING, "notify.client"):
            commit(producer, engine, unique, "refused")
            assert producer.flush(PATIENCE_SECONDS) == []
    (refusal,) = [record for record in caplog.records if "refuses its COMMIT" in record.message]
    assert refusal.levelno == logging.ERROR and why in refusal.message
    assert "a check will find it" not in caplog.text


@pytest.mark.parametrize("status", [421, 429, 500, 503, 507])
def test_an_outcome_without_room_has_not_reached_the_server(status: int) -> None:
    assert not is_taken(Item("", status))
    assert is_taken(Item("", 200)) and is_taken(Item("", 404)) and is_taken(Item("", 409))


def test_an_outbox_has_no_outcome_to_wait_for(engine: sa.Engine, unique: str) -> None:
    with pytest.raises(InvalidRequest, match="wait_for_outcome is not for mode outbox"):
        TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox", wait_for_outcome=True)


@pytest.mark.parametrize("waits", [False, True], ids=["flush", "wait_for_outcome"])
def test_coroutines_flush_and_wait(frozen: InMemoryServer, async_engine: AsyncEngine, unique: str, waits: bool) -> None:
    async def run() -> None:
        async with AsyncTransactionProducer(
            frozen.url, group=unique, engine=async_engine, wait_for_outcome=waits
        ) as producer:
            for number in range(3):
                async with AsyncSession(async_engine) as session, session.begin():
                    await producer.send(session, Message(unique, str(number)))
                if not waits:
                    assert await producer.flush(PATIENCE_SECONDS) == []
                assert len(await asyncio.to_thread(bodies, frozen, unique)) == number + 1
            async with async_engine.connect() as connection, producer.transaction(connection) as transaction:
                await transaction.send(Message(unique, "by a connection"))
            if not waits:
                assert await producer.flush(PATIENCE_SECONDS) == []
            assert "by a connection" in await asyncio.to_thread(bodies, frozen, unique)

    asyncio.run(run())


FUNCTION = """
import sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from notify.client import Message, TransactionProducer, use_explicit_begin

url, database, topic, waits = sys.argv[1:]
engine = sa.create_engine(database)
use_explicit_begin(engine)
producer = TransactionProducer(url, group=topic, engine=engine, wait_for_outcome=bool(waits))
for line in sys.stdin:
    with Session(engine) as session, session.begin():
        producer.send(session, Message(topic, line.strip()))
    if not waits:
        assert producer.flush(60) == []
    print("done", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("waits", ["", "yes"], ids=["flush", "wait_for_outcome"])
def test_a_function_that_is_frozen_after_each_call(
    frozen: InMemoryServer, engine: sa.Engine, unique: str, waits: str
) -> None:
    """The first transaction of each call stayed undecided while the platform kept the process frozen, and its sockets
    were dead when it was thawed."""
    command = [sys.executable, "-c", FUNCTION, frozen.url, str(engine.url), unique, waits]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True, bufsize=1) as function:
        assert function.stdin is not None and function.stdout is not None
        for call in range(3):
            function.send_signal(signal.SIGCONT)
            function.stdin.write(f"{call}\n")
            assert function.stdout.readline() == "done\n"
            function.send_signal(signal.SIGSTOP)
            assert bodies(frozen, unique) == [str(number) for number in range(call + 1)]
            frozen.restart()
            frozen.freeze()
        function.send_signal(signal.SIGCONT)
        function.stdin.close()
        assert function.wait(PATIENCE_SECONDS) == 0
