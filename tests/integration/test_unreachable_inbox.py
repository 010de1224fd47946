"""The inbox's database goes away: no handler is called meanwhile, and no attempt counts."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from notify.client import AsyncConsumer, Consumer, Inbox, ReceivedMessage, create_tables
from notify.client.consumer import consumer as consumers
from notify.errors import InboxUnavailable
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import lag, publish, running, taken_by
from tests.support.http import admin
from tests.support.proxy import Proxy, unencrypted
from tests.support.shop import make_async_engine, make_engine

Got = list[tuple[str, int]]


@pytest.fixture
def proxied(engine: sa.Engine) -> Iterator[tuple[Proxy, sa.URL]]:
    """A proxy in front of a database with an inbox, and its URL."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is a file, which does not go away")
    with Proxy(engine.url.host or "", engine.url.port or 0) as proxy:
        yield proxy, unencrypted(engine.url).set(host="127.0.0.1", port=proxy.port)


Kind = type[Consumer] | type[AsyncConsumer]


def consumer_of(kind: Kind, server: InMemoryServer, group: str, url: sa.URL, **options: Any) -> Any:
    """A consumer with an inbox in the database at `url`; `options` are its engine's."""
    engine = sa.create_engine(url, **options) if kind is Consumer else make_async_engine(url, **options)
    return kind(server.url, group=group, inbox=Inbox(engine))


def dead_letters(url: str, group: str) -> Any:
    return admin(url, "GET", f"groups/{group}/dead-letters")["messages"]


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any("no attempt counts" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_a_stop_does_not_wait_for_a_database_that_hangs(notify_server: InMemoryServer, unique: str, kind: Kind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = sa.make_url(f"postgresql+psycopg://u@127.0.0.1:{silent.getsockname()[1]}/d")
        consumer = consumer_of(kind, notify_server, unique, url)
        consumer.subscribe(unique)(taken_by(consumer, lambda message, session: None))
        with running(consumer):
            asked, _ = silent.accept()
        asked.close()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
@pytest.mark.parametrize("batch", [None, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_waiting_for_an_unreachable_inbox_makes_no_dead_letters(
    notify_server: InMemoryServer,
    proxied: tuple[Proxy, sa.URL],
    unique: str,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
    batch: int | None,
) -> None:
    """Each try counted as a failed attempt: an outage made dead letters of messages that no handler ever had, and later
    messages of their keys overtook them."""
    proxy, url = proxied
    got: Got = []

    def handle(messages: Any, session: Any) -> None:
        got.extend([(m.text, m.attempt) for m in (messages if batch else [messages])])

    consumer = consumer_of(kind, notify_server, unique, url)
    options: Any = {"mode": "ordered", "start": "earliest", "batch": batch, "max_attempts": 1}
    consumer.subscribe(unique, **options)(taken_by(consumer, handle))
    publish(notify_server.url, unique, ["a0", "b0"], key=True)
    with running(consumer):
        eventually(lambda: consumer.handled == 2, "the first messages to be committed")
        proxy.close()
        publish(notify_server.url, unique, ["a1", "a2", "b1"], key=True)
        eventually(lambda: warned(caplog), "the warning")
        assert len(got) == 2 and consumer.failed == 0
        proxy.reopen()
        eventually(lambda: lag(notify_server.url, unique) == 0, "the messages to be handled")
    assert sorted(got[2:]) == [("a1", 1), ("a2", 1), ("b1", 1)] and consumer.failed == 0
    assert [text for text, _ in got if text[0] == "a"] == ["a0", "a1", "a2"]
    assert dead_letters(notify_server.url, unique) == []


READ_ONLY = {
    "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "mariadb": "SET SESSION TRANSACTION READ ONLY",
}


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_sessions_with_a_former_primary_are_not_used_again(
    notify_server: InMemoryServer, engine: sa.Engine, unique: str, kind: Kind
) -> None:
    """They stay open and refuse writes, and the pool gave them to each message again and again: all messages waited
    until the service was restarted (sidorares/node-mysql2#2050, brettwooldridge/HikariCP#1971)."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is a file, which has no standby")
    got: Got = []

    def handle(message: Any, session: Any) -> None:
        got.append((message.text, message.attempt))

    consumer = consumer_of(kind, notify_server, unique, engine.url, pool_size=1, max_overflow=0)
    pool = consumer._inbox.engine

    @sa.event.listens_for(getattr(pool, "sync_engine", pool), "connect")
    def fail_over(driver: Any, record: object) -> None:
        """The first session is with the former primary."""
        if not sessions:
            driver.cursor().execute(READ_ONLY[engine.dialect.name])
            driver.commit()
        sessions.append(driver)

    sessions: list[Any] = []
    consumer.subscribe(unique, start="earliest", max_attempts=1)(taken_by(consumer, handle))
    publish(notify_server.url, unique, ["a", "b"])
    with running(consumer):
        eventually(lambda: consumer.handled == 2, "the messages to be handled")
    assert sorted(got) == [("a", 1), ("b", 1)] and consumer.failed == 0


def test_a_stop_gives_back_what_waits_for_the_database(
    notify_server: InMemoryServer, proxied: tuple[Proxy, sa.URL], unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy, url = proxied
    engine = sa.create_engine(url)
    consumer = Consumer(notify_server.url, group=unique, inbox=Inbox(engine))
    got: Got = []

    @consumer.subscribe(unique, start="earliest", max_attempts=1)
    def handle(message: Any, session: Any) -> None:
        got.append((message.text, message.attempt))

    publish(notify_server.url, unique, ["a"])
    with running(consumer):
        eventually(lambda: consumer.handled, "the first message to be committed")
        proxy.close()
        publish(notify_server.url, unique, ["b"])
        eventually(lambda: warned(caplog), "the warning")
    proxy.reopen()
    with running(consumer):
        eventually(lambda: lag(notify_server.url, unique) == 0, "the second message to be handled")
    assert got == [("a", 1), ("b", 1)] and dead_letters(notify_server.url, unique) == []
    engine.dispose()


@pytest.mark.long
def test_a_message_that_waited_for_long_is_given_to_another_instance(
    notify_server: InMemoryServer,
    proxied: tuple[Proxy, sa.URL],
    engine: sa.Engine,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one instance of several may have lost its way to the database."""
    monkeypatch.setattr(consumers, "INBOX_SECONDS", 0.0)
    proxy, url = proxied
    cut_off, other = sa.create_engine(url), make_engine(engine.url.render_as_string(hide_password=False))
    got: Got = []

    def started_with(database: sa.Engine) -> Consumer:
        consumer = Consumer(notify_server.url, group=unique, inbox=Inbox(database))

        @consumer.subscribe(unique, start="earliest", max_attempts=1)
        def handle(message: Any, session: Any) -> None:
            got.append((message.text, message.attempt))

        return consumer

    publish(notify_server.url, unique, ["a"])
    first = started_with(cut_off)
    with running(first):
        eventually(lambda: first.handled, "the first message to be committed")
        proxy.close()
        publish(notify_server.url, unique, ["b"])
        with running(started_with(other)):
            eventually(lambda: lag(notify_server.url, unique) == 0, "the second message to be handled")
    assert got == [("a", 1), ("b", 1)] and first.failed == 0
    cut_off.dispose()
    other.dispose()


def test_a_pool_with_fewer_connections_than_handlers_costs_no_attempt(
    notify_server: InMemoryServer, engine: sa.Engine, unique: str
) -> None:
    """A handler that held a connection for longer than the pool's time-out used up the attempts of the others."""
    if engine.dialect.name == "sqlite":
        pytest.skip("on SQLite handlers take turns")
    small = sa.create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.01)
    consumer = Consumer(notify_server.url, group=unique, inbox=Inbox(small), concurrency=4)
    got: Got = []
    may_end, begun = threading.Event(), threading.Semaphore(0)
    waits = consumer._waits_for_inbox

    def counted(*arguments: Any) -> float:
        begun.release()
        return waits(*arguments)

    consumer._waits_for_inbox = counted  # type: ignore[method-assign]

    @consumer.subscribe(unique, start="earliest", max_attempts=1)
    def handle(message: Any, session: Any) -> None:
        assert may_end.wait(PATIENCE_SECONDS)
        got.append((message.text, message.attempt))

    publish(notify_server.url, unique, ["a", "b", "c"])
    with running(consumer):
        for _ in range(4):
            assert begun.acquire(timeout=PATIENCE_SECONDS), "another handler did not wait for a connection"
        may_end.set()
        eventually(lambda: lag(notify_server.url, unique) == 0, "the messages to be handled")
    assert sorted(got) == [("a", 1), ("b", 1), ("c", 1)] and consumer.failed == 0
    small.dispose()


@pytest.mark.parametrize("batch", [None, 2])
def test_another_inbox_that_a_handler_uses_fails_the_handler(
    notify_server: InMemoryServer, engine: sa.Engine, unique: str, batch: int | None
) -> None:
    """The handler was called again and again for a minute, and no attempt counted."""
    if engine.dialect.name != "sqlite":
        pytest.skip("every database is alike here")
    other = Inbox(sa.create_engine("mysql+pymysql://127.0.0.1:1/nothing_listens_here"))
    consumer = Consumer(notify_server.url, group=unique, inbox=Inbox(engine), concurrency=1)
    got: list[str] = []

    @consumer.subscribe(unique, start="earliest", max_attempts=1, batch=batch)
    def handle(messages: Any, session: Any) -> None:
        message = messages[0] if batch else messages
        got.append(message.text)
        other.run("another group", message, lambda message, session: None)

    publish(notify_server.url, unique, ["a"])
    with running(consumer):
        eventually(lambda: consumer.failed == 1, "the failure")
    assert got == ["a"] and len(dead_letters(notify_server.url, unique)) == 1


def test_another_inbox_that_a_coroutine_uses_fails_it(tmp_path: Path) -> None:
    async def run() -> InboxUnavailable:
        engine = make_async_engine(f"sqlite:///{tmp_path}/shop.db")
        async with engine.begin() as connection:
            await connection.run_sync(create_tables)
        other = Inbox(create_async_engine("mysql+aiomysql://127.0.0.1:1/nothing_listens_here"))
        message = ReceivedMessage("01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d.0", "t", 0, 0, b"x", None, None, {}, 1, "")

        async def nothing(message: Any, session: Any) -> None:
            return None

        async def handle(message: Any, session: Any) -> None:
            with pytest.raises(InboxUnavailable) as raised:
                await other.run_async("g", message, nothing)
            assert not raised.value.is_of_handler, "the other inbox's handler was not called"
            raise raised.value

        with pytest.raises(InboxUnavailable) as raised:
            await Inbox(engine).run_async("g", message, handle)
        await engine.dispose()
        return raised.value

    assert asyncio.run(run()).is_of_handler
