"""Consumers of a queue server: handlers, renewal, the inbox, batches; with threads and with asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import threading
import warnings
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from notify.client import (
    AsyncConsumer,
    AsyncTransactionProducer,
    Consumer,
    Inbox,
    Message,
    ReceivedMessage,
    TransactionProducer,
    create_tables,
)
from notify.client.consumer import session
from notify.client.consumer.session import Session as ConsumerSession
from notify.client.handling.hand import CAUTIOUS, IN_HAND_BYTES
from notify.client.threads.loop import LoopThread
from notify.client.transport.http import HttpClient
from notify.errors import BindingRefused, DeadLetter, InvalidRequest, Unavailable
from notify.protocol.limits import LIMITS
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.groups import Caller, bodies, drain, lag, outlast_a_lease, publish, run, running, subscribe, taken_by
from tests.support.http import admin, metric, post
from tests.support.shop import Base, Order, make_async_engine
from tests.support.transactions import half_request


def test_a_slow_handler_keeps_its_lease(frozen_server: InMemoryServer, unique: str) -> None:
    attempts: list[int] = []
    is_done = threading.Event()
    consumer = Consumer(frozen_server.url, group=unique, lease=1)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        assert is_done.wait(PATIENCE_SECONDS)

    ran_out = metric(frozen_server.url, "notify_leases_expired_total")
    with TransactionProducer(frozen_server.url, group=unique) as producer:
        producer.publish(Message(unique, "slow"))
    with running(consumer):
        eventually(lambda: attempts, "the handler to begin")
        outlast_a_lease(frozen_server, unique, 1)
        is_done.set()
        eventually(lambda: consumer.handled == 1, "the handler's return")
    assert attempts == [1] and lag(frozen_server.url, unique) == 0
    assert metric(frozen_server.url, "notify_leases_expired_total") == ran_out


@pytest.mark.long
def test_a_thousand_large_messages_are_not_in_memory_at_a_time(notify_server: InMemoryServer) -> None:
    """The bodies in hand are bounded, whatever `batch` says: by IN_HAND_BYTES, and an answer of the server more."""
    for part in range(7):  # a request takes 8 MiB
        publish(notify_server.url, "t", [f"{part}.{n} " + "x" * ((1 << 20) - 100) for n in range(7)])
    consumer = Consumer(notify_server.url, group="g", batch=1000, concurrency=2)
    is_full = threading.Event()

    @consumer.subscribe("t", start="earliest")
    def handle(message: ReceivedMessage) -> None:
        assert is_full.wait(PATIENCE_SECONDS)

    def held() -> int:
        """The bytes in hand, once the consumer asks for no more, or there is no more."""
        hand = consumer._hand
        if hand is None or not hand.count:
            return 0
        if hand.most < 1000:
            hand._limit = None  # as if it had worked for a while
            hand._loop.call_soon_threadsafe(hand.moved.set)
        return hand._bytes if hand.most == 1000 and (hand.count == 49 or not hand._room()) else 0

    with running(consumer):
        in_hand = eventually(held, "the consumer to hold all that it may")
        is_full.set()
        eventually(lambda: consumer.handled == 49, "all messages")
    assert IN_HAND_BYTES <= in_hand <= IN_HAND_BYTES + LIMITS.reply_bytes


def test_stopping_while_the_server_is_away_asks_for_nothing_more(
    notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notify.client.consumer.session.RETRY_SECONDS", PATIENCE_SECONDS)
    first = "/v1/groups/g/subscriptions/t"
    consumer = Consumer(notify_server.url, group="g")
    consumer.subscribe("t")(print)
    with contextlib.ExitStack() as consuming:
        with notify_server.down():
            consuming.enter_context(running(consumer))
            eventually(lambda: notify_server.answered(first) == 1, "the consumer's first request to fail")
    assert notify_server.answered(first) == 1
    assert notify_server.answered("/v1/groups/g/receive") == 0


def test_a_failure_that_comes_with_the_stop_is_no_failure(
    notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the server is unreachable, a consumer that is stopped during its request ends, and `run` raises nothing."""
    consumer = Consumer(notify_server.url, group="g")
    consumer.subscribe("t")(print)
    call = HttpClient.call

    async def stopped_meanwhile(client: HttpClient, method: str, path: str, *rest: Any) -> bytes:
        if "/receive" in path:
            consumer.stop()
            await asyncio.sleep(0)  # a turn of the loop, in which the stop is seen
            raise Unavailable("away")
        return await call(client, method, path, *rest)

    monkeypatch.setattr(HttpClient, "call", stopped_meanwhile)
    consumer.run(signals=False)


def test_a_server_that_answers_again_is_logged(
    notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of a consumer ended with "the server is unreachable, trying again in 5.3 s", though it received again."""
    consumer = Consumer(notify_server.url, group="g")
    consumer.subscribe("t")(print)
    call, waits = HttpClient.call, []

    async def away_once(client: HttpClient, method: str, path: str, body: bytes, *rest: Any) -> bytes:
        if "/receive" in path:
            waits.append(msgspec.msgpack.decode(body).get("wait", 0))
            if len(waits) == 1:
                raise Unavailable("away")
            if len(waits) == 3:
                consumer.stop()
        return await call(client, method, path, body, *rest)

    monkeypatch.setattr(HttpClient, "call", away_once)
    with caplog.at_level(logging.INFO, "notify.consumer"):
        consumer.run(signals=False)
    said = [text for text in caplog.messages if "trying again" in text or "answers again" in text]
    assert len(said) == 2 and said[1] == f"the server at {notify_server.url} answers again", said
    assert waits[1] == 0 < waits[2], "the first answer after the outage is one to a request that does not wait"


def test_async_producer_and_consumer(engine_url: str, server: ServerProcess, unique: str) -> None:
    """AsyncSession, savepoints, AsyncConnection and AsyncConsumer with an inbox work, and none blocks the loop."""

    async def run() -> list[str]:
        engine = make_async_engine(engine_url)
        async with engine.begin() as connection:
            await connection.run_sync(create_tables)
            await connection.run_sync(Base.metadata.create_all)
        sessions = async_sessionmaker(engine)
        consumer = AsyncConsumer(server.url, group=unique, inbox=Inbox(engine), concurrency=1)
        seen: list[str] = []

        @consumer.subscribe(unique, start="earliest")
        async def handle(message: ReceivedMessage, session) -> None:  # type: ignore[no-untyped-def]
            session.add(Order(item="effect of " + message.text))
            seen.append(message.text)

        async with AsyncTransactionProducer(server.url, group=unique, engine=engine) as producer:
            async with sessions() as session, session.begin():
                session.add(Order(item="a"))
                await producer.send(session, Message(unique, "a"))
                with pytest.raises(ZeroDivisionError):
                    async with session.begin_nested():
                        await producer.send(session, Message(unique, "rolled back"))
                        raise ZeroDivisionError
            async with sessions() as session:
                await producer.send(session, Message(unique, "never"))

            @producer.transactional(sessions)
            async def place(session, item: str) -> None:  # type: ignore[no-untyped-def]
                session.add(Order(item=item))
                await producer.send(session, Message(unique, item))

            await place("b")
            async with engine.connect() as connection, producer.transaction(connection) as tx:
                await tx.send(Message(unique, "c"))
            consuming = asyncio.ensure_future(consumer.run())
            await eventually_async(lambda: consumer.handled >= 3, "3 effects")
            consumer.stop()
            await consuming
        async with sessions() as session:
            items = sorted((await session.scalars(sa.select(Order.item))).all())
        await engine.dispose()
        assert sorted(seen) == ["a", "b", "c"]
        return list(items)

    items = asyncio.run(run())
    assert items == ["a", "b", "effect of a", "effect of b", "effect of c"]


def test_sync_and_async_do_not_mix(server: ServerProcess, unique: str) -> None:
    with pytest.raises(BindingRefused, match="AsyncTransactionProducer"):
        TransactionProducer(server.url, group=unique, engine=create_async_engine("sqlite+aiosqlite://"))  # type: ignore[arg-type]
    with pytest.raises(BindingRefused, match="TransactionProducer"):
        AsyncTransactionProducer(server.url, group=unique, engine=sa.create_engine("sqlite://"))


def test_a_producer_survives_a_fork(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    """After gunicorn's preload and fork, the child's first send works, with a thread of its own."""
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engine) as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "parent"))
        # A database's library must not be in use by another thread while the process forks: SQLite's mutexes stay
        # locked in the child. So wait until the producer has read its source, and asks for checks.
        eventually(lambda: is_online(server.url, unique), "the producer to ask for checks")
        engine.dispose()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads run while the test forks
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                engine.dispose(close=False)
                with Session(engine) as session, session.begin():
                    producer.send(session, Message(unique, "child"))
                producer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    assert sorted(bodies(drain(server.url, unique, unique, 2))) == ["child", "parent"]


def is_online(url: str, producer_group: str) -> bool:
    """Whether a producer of the group polls for checks: the server shows that with a transaction, made for this."""
    request = half_request(producer_group)
    name = request["transactions"][0]["id"]
    post(url, "/v1/transactions", request)
    answer = admin(url, "GET", f"transactions/{name}")["producer_online"]
    admin(url, "POST", f"transactions/{name}/rollback", {})
    return bool(answer)


def test_threads_that_are_first_at_once_share_one_loop(server: ServerProcess, unique: str) -> None:
    """Threads that send their first message at once share one loop. Each started a loop of its own."""
    for n in range(5):
        with TransactionProducer(server.url, group=unique) as producer:
            gate = threading.Barrier(16)

            def publish(number: int, producer: TransactionProducer = producer, gate: threading.Barrier = gate) -> None:
                gate.wait(PATIENCE_SECONDS)
                producer.publish(Message(f"{unique}.{n}", str(number)))  # noqa: B023

            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                list(pool.map(publish, range(16)))
            name = f"notify-producer-{unique}"
            assert sum(thread.name == name for thread in threading.enumerate()) == 1


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_a_consumer_that_runs_is_not_run_again(
    notify_server: InMemoryServer, unique: str, kind: type[Consumer] | type[AsyncConsumer]
) -> None:
    """Threads that shared one consumer mixed up what they had in hand, and a stop reached only the last of them."""
    consumer = kind(notify_server.url, group=unique)
    handled: list[str] = []
    consumer.subscribe(unique, start="earliest")(taken_by(consumer, lambda message: handled.append(message.text)))
    with running(consumer, subscribed=True):
        with pytest.raises(InvalidRequest, match="running already"):
            run(consumer)
        publish(notify_server.url, unique, ["a"])
        eventually(lambda: handled == ["a"], "the message")
    publish(notify_server.url, unique, ["b"])
    with running(consumer):
        eventually(lambda: handled == ["a", "b"], "the message after a second run")


def test_a_stop_as_a_second_run_begins_is_heeded(
    notify_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed for one after the end of the first run, so that a SIGTERM of that moment stopped nothing."""

    class Starting(LoopThread):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            consumer.stop()

    consumer = Consumer(notify_server.url, group=unique)
    consumer.subscribe(unique)(lambda message: None)
    with running(consumer, subscribed=True):
        pass
    monkeypatch.setattr("notify.client.consumer.consumer.LoopThread", Starting)
    second = threading.Thread(target=consumer.run, daemon=True)
    second.start()
    second.join(PATIENCE_SECONDS)
    assert not second.is_alive()


def test_a_second_signal_as_the_run_ends_is_no_error(notify_server: InMemoryServer, unique: str) -> None:
    """It met a closed loop, and raised RuntimeError in the main thread; a later run ended with the signal's error."""
    consumer = Consumer(notify_server.url, group=unique)
    consumer.subscribe(unique)(lambda message: None)
    with running(consumer, subscribed=True):
        pass
    consumer._cut(signal.SIGTERM)
    with running(consumer, subscribed=True):
        pass


def test_a_consumer_that_runs_takes_no_further_topic(notify_server: InMemoryServer, unique: str) -> None:
    """Nothing of it was received, and nobody was told."""
    consumer = Consumer(notify_server.url, group=unique)
    consumer.subscribe(unique)(lambda message: None)
    with running(consumer, subscribed=True), pytest.raises(InvalidRequest, match="before run"):
        consumer.subscribe("another")
    consumer.subscribe("another")(lambda message: None)


def test_a_dead_letter_of_a_task_group_is_one(notify_server: InMemoryServer, unique: str) -> None:
    """A TaskGroup raises a group, so that the message was retried 16 times, each time with its other tasks' effects."""
    consumer = AsyncConsumer(notify_server.url, group=unique)

    async def charge() -> None:
        raise DeadLetter("an order without an item")

    @consumer.subscribe(unique, start="earliest")
    async def handle(message: ReceivedMessage) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(charge())

    publish(notify_server.url, unique, ["a"])
    with running(consumer):
        eventually(lambda: consumer.failed, "the failure")
    (letter,) = admin(notify_server.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert letter["headers"]["notify-dead-letter-reason"] == "an order without an item"


# --- batches: leases of long ones, and how much is taken from a server that may give all --------------------------


def test_a_batch_longer_than_its_lease_stays_with_its_consumer(notify_server: InMemoryServer) -> None:
    """Also the messages that wait behind it, beside a second instance that is idle."""
    notify_server.freeze()
    url = notify_server.url
    attempts: list[int] = []
    has_begun, may_end = threading.Event(), threading.Event()
    consumers = [Consumer(url, group="g", lease=1, concurrency=1) for _ in range(2)]

    def handle(messages: list[ReceivedMessage]) -> None:
        attempts.extend([m.attempt for m in messages])
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    for consumer in consumers:
        consumer.subscribe("t", start="earliest", batch=10)(handle)
    with running(*consumers, subscribed=True):
        publish(url, "t", [str(n) for n in range(40)])
        assert has_begun.wait(PATIENCE_SECONDS)
        outlast_a_lease(notify_server, "g", 1)
        may_end.set()
        eventually(lambda: lag(url, "g") == 0, "everything to be settled")
    assert attempts == [1] * 40


def test_a_consumer_of_batches_takes_few_at_first(notify_server: InMemoryServer) -> None:
    """Until it is known that they do not come again: each message in hand counts an attempt where its process dies."""
    url = notify_server.url
    publish(url, "t", [str(n) for n in range(300)])
    subscribe(url, "g", "t", start="earliest")
    calls: list[list[int]] = []
    consumer = Consumer(url, group="g", concurrency=1)
    consumer.subscribe("t", batch=200)(lambda messages: calls.append([m.attempt for m in messages]))
    with running(consumer):
        eventually(lambda: lag(url, "g") == 0, "everything to be settled")
    assert len(calls[0]) <= CAUTIOUS < max(map(len, calls)) <= 200


def test_messages_whose_consumer_died_are_handled_alone(notify_server: InMemoryServer) -> None:
    notify_server.freeze()
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", [str(n) for n in range(100)])
    assert len(Caller(url, "g", "dead").receive("t", max=100)) == 100
    notify_server.advance(31)
    publish(url, "t", [str(n) for n in range(100, 103)])
    calls: list[list[tuple[int, int]]] = []
    consumer = Consumer(url, group="g", concurrency=1)
    consumer.subscribe("t", batch=200)(lambda messages: calls.append([(int(m.text), m.attempt) for m in messages]))
    with running(consumer):
        eventually(lambda: lag(url, "g") == 0, "everything to be settled")
    again = [call for call in calls if call[0][1] == 2]
    assert sorted(again) == [[(n, 2)] for n in range(100)]
    assert sorted(n for call in calls for n, attempt in call if attempt == 1) == [100, 101, 102]


def test_returned_messages_go_to_another_consumer(
    notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into the long poll of the one that ends, where nobody would handle it before its lease runs out."""
    receive = ConsumerSession._receive

    async def receive_a_little_longer(session: ConsumerSession, *asked: Any) -> list[Any]:
        polling = asyncio.ensure_future(receive(session, *asked))
        try:
            return await asyncio.shield(polling)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)  # a server hears late that nobody waits for its answer any more
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            raise

    monkeypatch.setattr(ConsumerSession, "_receive", receive_a_little_longer)
    monkeypatch.setattr(session, "GIVE_BACK_SECONDS", PATIENCE_SECONDS)
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["0", "1", "2"])
    consumer = Consumer(url, group="g", concurrency=1)

    @consumer.subscribe("t", batch=4)
    def handle(messages: list[ReceivedMessage]) -> None:
        if len(messages) > 1:  # the first request brings one, which may be alone
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        consumer.run(signals=False)
    again = Caller(url, "g", "other").receive("t", max=10)
    assert {m["body"] for m in again} >= {"1", "2"} and {m["attempt"] for m in again} == {1}
