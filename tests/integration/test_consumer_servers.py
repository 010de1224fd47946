"""A consumer and its servers: a server leaves the registry and returns, or is unreachable when an ack is due."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.client.transport.servers import Servers
from notify.errors import Conflict, NotifyError
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.groups import Caller, is_subscribed, lag, outlast_a_lease, publish, running, subscribe, taken_by
from tests.support.virtual_loop import JumpingLoop


class Registry:
    """A registry that tells a consumer which queue servers there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
        self.named: Sequence[str] = urls
        self.asked = 0
        monkeypatch.setattr("notify.client.consumer.sessions.MEMBERS_SECONDS", 0.02)
        monkeypatch.setattr(Servers, "refresh", self._refresh)
        monkeypatch.setattr(Servers, "urls", lambda servers, shard=None: self.named)

    async def _refresh(self) -> None:
        self.asked += 1

    def names(self, *urls: str) -> None:
        """Change the list of servers, and wait until a consumer has acted on it."""
        self.named, asked = urls, self.asked
        eventually(lambda: self.asked > asked + 1, "the consumer to look at the registry")


@pytest.fixture
def registry(notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(monkeypatch, notify_server.url)


def busy_consumer(url: str, **options: Any) -> tuple[Consumer, threading.Event, threading.Event]:
    """A consumer whose handler waits; the event of its begin, and the event that lets it end."""
    has_begun, may_end = threading.Event(), threading.Event()
    consumer = Consumer(url, group="g", **options)

    @consumer.subscribe("t")
    def handle(message: ReceivedMessage) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    return consumer, has_begun, may_end


def test_a_server_that_was_missing_from_the_registry_is_consumed_from_again(
    notify_server: InMemoryServer, registry: Registry
) -> None:
    """Handlers that run meanwhile are settled, and free their slots."""
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", [str(n) for n in range(32)])
    consumer, _, may_end = busy_consumer(url, concurrency=32, batch=32)

    with running(consumer):
        eventually(
            lambda: notify_server.under_way("/v1/groups/g/receive") == 0 and lag(url, "g") == 32, "32 messages in hand"
        )
        registry.names()
        publish(url, "t", ["later"])
        registry.names(url)
        may_end.set()
        eventually(lambda: lag(url, "g") == 0, "all messages to be settled")
    assert consumer.handled == 33, "no message came twice"


def test_an_ack_reaches_a_server_that_left_the_registry(notify_server: InMemoryServer, registry: Registry) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["x"])
    consumer, has_begun, may_end = busy_consumer(url)

    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        registry.names()
        eventually(lambda: notify_server.under_way("/v1/groups/g/receive") == 0, "the poll to end")
        may_end.set()
        eventually(lambda: lag(url, "g") == 0, "the message to be settled")


def test_nothing_is_asked_of_a_server_that_left(notify_server: InMemoryServer, registry: Registry) -> None:
    """The poll ends with its server. It was repeated for ever on the closed client, and its task was lost."""

    async def run() -> list[str]:
        consumer = AsyncConsumer(notify_server.url, group="g")
        consumer.subscribe("t")(taken_by(consumer, print))
        consuming = asyncio.ensure_future(consumer.run())
        await eventually_async(lambda: notify_server.under_way("/v1/groups/g/receive") == 1, "the poll")
        registry.named = ()
        await eventually_async(lambda: notify_server.under_way("/v1/groups/g/receive") == 0, "the poll to end")
        await eventually_async(lambda: not polls(), "the poll's task to end")
        consumer.stop()
        await consuming
        return polls()

    assert asyncio.run(run()) == []


def polls() -> list[str]:
    """The tasks of this loop that repeat a request."""
    return [str(task) for task in asyncio.all_tasks() if "_until_served" in str(task)]


def test_a_stop_waits_until_the_server_takes_the_ack(notify_server: InMemoryServer) -> None:
    """A consumer is stopped while the server is away: the effect took place, so the ack must arrive."""
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["x"])
    consumer, has_begun, may_end = busy_consumer(url)

    settle = "/v1/groups/g/settle"
    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        with notify_server.down():
            consumer.stop()
            may_end.set()
            eventually(lambda: notify_server.answered(settle) > 0, "a settle that fails")
    assert lag(url, "g") == 0


@pytest.mark.parametrize("seconds", [0.5, 7.0])
def test_a_stop_does_not_wait_for_a_server_that_hangs(seconds: float) -> None:
    """Nothing is in hand yet: it waited up to 15 s, until the server had listed the members and subscribed."""
    loop = JumpingLoop()

    async def run(url: str) -> float:
        consumer = AsyncConsumer(url, group="g")
        consumer.subscribe("t")(taken_by(consumer, print))
        consuming = asyncio.ensure_future(consumer.run())
        await asyncio.sleep(seconds)  # in virtual time: the members are asked for, or the subscription is made
        stopped_at = loop.now
        consumer.stop()
        await consuming
        return loop.now - stopped_at

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections into the backlog
        try:
            took = loop.run_until_complete(run(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        finally:
            loop.close()
    assert took < 0.1


@pytest.mark.long
def test_a_stop_waits_for_a_handler_longer_than_its_lease(
    notify_server: InMemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    notify_server.freeze()
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["x"])
    consumer, has_begun, may_end = busy_consumer(url, lease=1)

    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        consumer.stop()
        outlast_a_lease(notify_server, "g", 1)
        may_end.set()
    assert (consumer.handled, lag(url, "g")) == (1, 0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_stop_says_what_it_left(notify_server: InMemoryServer, caplog: pytest.LogCaptureFixture) -> None:
    """`drain` bounds the wait; the message comes again, and a log line names it."""
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["x"])
    consumer, has_begun, may_end = busy_consumer(url, drain=0.05)

    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        consumer.stop()
    may_end.set()
    assert (consumer.handled, lag(url, "g")) == (0, 1)
    said = [record.getMessage() for record in caplog.records if "unsettled" in record.getMessage()]
    assert len(said) == 1 and notify_server.messages("t")[0].id in said[0]
    notify_server.advance(31)
    assert Caller(url, "g", "other").receive("t")[0]["attempt"] == 1, "no attempt counts"


def test_a_failing_server_does_not_take_the_acks_of_another(
    notify_server: InMemoryServer, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """One server refuses the group for good: the consumer ends once the other server's message is settled."""
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["x"])
    consumer, has_begun, may_end = busy_consumer(url)

    failures: list[NotifyError] = []

    def run() -> None:
        try:
            consumer.run()
        except NotifyError as error:
            failures.append(error)

    with InMemoryServer() as other:
        subscribe(other.url, "g", "t", "ordered")
        publish(other.url, "t", ["held"])
        Caller(other.url, "g", "another").receive("t")  # the lease keeps the group's mode
        thread = threading.Thread(target=run)
        thread.start()
        assert has_begun.wait(PATIENCE_SECONDS)
        registry.named = (url, other.url)
        eventually(lambda: notify_server.under_way("/v1/groups/g/receive") == 0, "the end of the polls")
        may_end.set()
        thread.join(PATIENCE_SECONDS)
    assert [(type(error), error.code) for error in failures] == [(Conflict, "mode_in_use")]
    assert (consumer.handled, lag(url, "g")) == (1, 0)


# --- starting and stopping ----------------------------------------------------------------------------------------


def test_run_works_in_any_thread(notify_server: InMemoryServer) -> None:
    """`run()` works in any thread. Only the main thread gets signals, and elsewhere `run()` failed."""
    consumer = Consumer(notify_server.url, group="g")
    consumer.subscribe("t")(print)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            consumer.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: failures or is_subscribed(notify_server.url, "g"), "the group")
    consumer.stop()
    thread.join(PATIENCE_SECONDS)
    assert failures == [] and not thread.is_alive()


def test_a_stop_before_the_run_is_not_lost(notify_server: InMemoryServer) -> None:
    consumer = Consumer(notify_server.url, group="g")
    consumer.subscribe("t")(print)
    consumer.stop()
    consumer.run(signals=False)
    with running(consumer, subscribed=True):
        pass
    consumer.stop()  # after a run `stop` does nothing
    with running(consumer):
        eventually(lambda: notify_server.under_way("/v1/groups/g/receive") == 1, "the poll of a third run")


def test_another_mode_ends_the_consumer_with_the_servers_words(notify_server: InMemoryServer) -> None:
    url = notify_server.url
    subscribe(url, "g", "t", "ordered")
    publish(url, "t", ["x"])
    assert Caller(url, "g", "first").receive("t")
    consumer = Consumer(url, group="g")
    consumer.subscribe("t", mode="shared")(print)
    with pytest.raises(Conflict, match="mode ordered") as raised:
        consumer.run(signals=False)
    assert raised.value.code == "mode_in_use"


def test_a_broadcast_without_a_name_that_stays_is_warned_of(
    notify_server: InMemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(**options: str) -> list[str]:
        caplog.clear()
        consumer = Consumer(notify_server.url, group="g", **options)
        consumer.subscribe("t", mode="broadcast")(print)
        with running(consumer, subscribed=True):
            pass
        return [record.getMessage() for record in caplog.records if "instance=" in record.getMessage()]

    assert len(warned()) == 1
    assert warned(instance="cache-1") == []
