"""The modes in which the instances of a group share a topic: ordered by key, exclusive, failover, broadcast."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.client.consumer import session
from notify.errors import NotifyError
from notify.protocol.limits import Mode
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import Caller, bodies, is_subscribed, publish, running, subscribe
from tests.support.http import ask, post, refusal


@contextmanager
def waiting(server: InMemoryServer, caller: Caller, topic: str) -> Iterator[list[dict[str, Any]]]:
    """Let the caller wait for messages during the block; the list has them after it."""
    received: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: received.extend(caller.receive(topic, wait=50)))
    thread.start()
    eventually(lambda: server.under_way(f"/v1/groups/{caller.group}/receive") == 1, "the consumer to wait")
    yield received
    thread.join(PATIENCE_SECONDS)


# --- ordered --------------------------------------------------------------------------------------------------


def test_of_each_key_one_is_in_flight(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    subscribe(url, unique, unique, "ordered")
    publish(url, unique, ["a1", "b1", "a2", "b2", "a3"], key=True)
    publish(url, unique, ["no key", "none either"])
    x, y = Caller(url, unique, "x"), Caller(url, unique, "y")
    first = x.receive(unique)
    assert bodies(first) == ["a1", "b1", "no key", "none either"]
    assert y.receive(unique) == []
    assert x.settle(first[:1]) == [200]
    second = y.receive(unique)
    assert bodies(second) == ["a2"]
    assert y.settle(second, "retry", delay=0.3) == [200]
    assert y.receive(unique) == []  # a3 waits for a2's retry
    frozen_server.advance(0.3)
    again = y.receive(unique)
    assert (bodies(again), again[0]["attempt"]) == (["a2"], 2)
    assert y.settle(again, "dead_letter") == [200]  # which frees its key as well
    assert bodies(y.receive(unique)) == ["a3"]
    assert x.settle(first[1:2]) == [200]
    assert bodies(x.receive(unique)) == ["b2"]


def test_an_expired_lease_keeps_its_key(frozen_server: InMemoryServer, unique: str) -> None:
    subscribe(frozen_server.url, unique, unique, "ordered")
    publish(frozen_server.url, unique, ["a1", "a2"], key=True)
    x = Caller(frozen_server.url, unique, "x")
    assert bodies(x.receive(unique, lease=1)) == ["a1"]
    frozen_server.advance(0.999)
    assert x.receive(unique) == []
    frozen_server.advance(0.001)
    again = x.receive(unique)
    assert (bodies(again), again[0]["attempt"]) == (["a1"], 2)
    assert x.settle(again) == [200]
    assert bodies(x.receive(unique)) == ["a2"]


def test_a_waiting_consumer_gets_the_next_of_a_key(frozen_server: InMemoryServer, unique: str) -> None:
    subscribe(frozen_server.url, unique, unique, "ordered")
    publish(frozen_server.url, unique, ["a1", "a2"], key=True)
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    first = x.receive(unique)
    with waiting(frozen_server, y, unique) as received:
        x.settle(first)
    assert bodies(received) == ["a2"]


def test_order_survives_a_kill(killed_server: ServerProcess, unique: str) -> None:
    subscribe(killed_server.url, unique, unique, "ordered")
    publish(killed_server.url, unique, ["a1", "b1", "a2", "b2"], key=True)
    x = Caller(killed_server.url, unique, "x")
    first = x.receive(unique)
    assert x.settle(first[:1]) == [200]
    killed_server.kill()
    killed_server.start()
    assert bodies(x.receive(unique)) == ["b1", "a2"]


# --- exclusive and failover -----------------------------------------------------------------------------------


def test_a_second_instance_is_refused(frozen_server: InMemoryServer, unique: str) -> None:
    subscribe(frozen_server.url, unique, unique, "exclusive")
    publish(frozen_server.url, unique, ["1", "2"])
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    assert bodies(x.receive(unique, lease=1, max=1)) == ["1"]
    frozen_server.advance(0.999)
    assert "failover" in refused(y, 409, "topic_is_taken")
    frozen_server.advance(0.001)  # x is gone: its messages come first, in their order
    again = y.receive(unique, max=10)
    assert [(m["body"], m["attempt"]) for m in again] == [("1", 2), ("2", 1)]
    refused(x, 409, "topic_is_taken")


def refused(caller: Caller, status: int, code: str) -> str:
    """The detail of the error with which the server refuses an instance."""
    answered, problem = ask(caller.url, "POST", f"/v1/groups/{caller.group}/receive", {"instance": caller.instance})
    assert (answered, problem["code"]) == (status, code)
    return str(problem["detail"])


def test_a_standby_takes_over_when_the_lease_is_over(frozen_server: InMemoryServer, unique: str) -> None:
    subscribe(frozen_server.url, unique, unique, "failover")
    publish(frozen_server.url, unique, ["1", "2", "3"])
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    had = x.receive(unique, lease=1, max=2)
    assert bodies(had) == ["1", "2"]
    assert x.settle(had[:1]) == [200]
    with waiting(frozen_server, y, unique) as taken:
        frozen_server.advance(0.999)
        assert frozen_server.under_way(f"/v1/groups/{unique}/receive") == 1
        frozen_server.advance(0.001)
    assert [(m["body"], m["attempt"]) for m in taken] == [("2", 2), ("3", 1)]
    assert x.settle(had[1:]) == [410]
    assert x.receive(unique) == []  # x is the standby now
    assert y.settle(taken) == [200, 200]


def test_a_standby_that_waits_costs_the_active_one_nothing(frozen_server: InMemoryServer, unique: str) -> None:
    subscribe(frozen_server.url, unique, unique, "failover")
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    assert x.receive(unique, lease=2) == []
    with waiting(frozen_server, y, unique) as taken:
        for n in range(8):
            publish(frozen_server.url, unique, [str(n)])
            received = x.receive(unique, lease=2)
            assert bodies(received) == [str(n)]
            x.settle(received)
        publish(frozen_server.url, unique, ["x is gone"])
        frozen_server.advance(2)
    assert bodies(taken) == ["x is gone"]


# --- giving up ------------------------------------------------------------------------------------------------


@pytest.fixture
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that ends waits for the server's answers, however slow the machine is."""
    monkeypatch.setattr(session, "LEAVE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(session, "CANCEL_SECONDS", PATIENCE_SECONDS)


def leave(caller: Caller) -> None:
    post(caller.url, f"/v1/groups/{caller.group}/leave", {"instance": caller.instance})


def test_a_standby_takes_over_when_the_owner_leaves(frozen_server: InMemoryServer, unique: str) -> None:
    """The clock stands still: it waited for the lease of an instance that had stopped."""
    subscribe(frozen_server.url, unique, unique, "failover")
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    assert x.receive(unique) == []
    publish(frozen_server.url, unique, ["1", "2"])
    had = x.receive(unique, max=1)
    leave(x)
    assert y.receive(unique) == [], "x still holds a message, and may be at work on it"
    assert x.settle(had) == [200]
    with waiting(frozen_server, y, unique) as taken:
        leave(x)
    assert bodies(taken) == ["2"]
    assert x.receive(unique) == [], "y has it now"
    leave(x)  # it has nothing to give up
    assert y.settle(taken) == [200]


def test_another_instance_is_not_refused_once_an_exclusive_one_has_left(
    frozen_server: InMemoryServer, unique: str
) -> None:
    subscribe(frozen_server.url, unique, unique, "exclusive")
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    assert x.receive(unique) == []
    refused(y, 409, "topic_is_taken")
    leave(y)  # gives up nothing of x
    refused(y, 409, "topic_is_taken")
    leave(x)
    publish(frozen_server.url, unique, ["1"])
    assert bodies(y.receive(unique)) == ["1"]
    refused(x, 409, "topic_is_taken")


@pytest.mark.parametrize("mode", ["failover", "broadcast"])
def test_a_poll_of_an_instance_that_leaves_ends(frozen_server: InMemoryServer, unique: str, mode: str) -> None:
    """Messages that it would be handed would be leased to nobody."""
    subscribe(frozen_server.url, unique, unique, mode)
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    if mode == "broadcast":
        assert x.receive(unique) == y.receive(unique) == []
    with waiting(frozen_server, x, unique) as received:
        leave(x)
        publish(frozen_server.url, unique, ["1"])
    assert received == []
    assert bodies(y.receive(unique)) == ["1"]


@pytest.mark.parametrize("mode", ["shared", "ordered", "failover"])
def test_returned_messages_are_available_immediately_without_an_attempt(
    frozen_server: InMemoryServer, unique: str, mode: str
) -> None:
    subscribe(frozen_server.url, unique, unique, mode, max_attempts=1)
    x, y = Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    publish(frozen_server.url, unique, ["a1", "a2", "b1"], key=True)
    had = x.receive(unique)
    assert x.settle(had[:1], "give_back") == [200]
    assert x.settle(had[:1]) == [410]
    other = x if mode == "failover" else y
    again = other.receive(unique)
    assert [(m["body"], m["attempt"]) for m in again] == [("a1", 1)]
    assert other.settle(again) == [200]
    if mode != "ordered":
        assert x.settle(had[1:]) == [200, 200]


@pytest.mark.usefixtures("patient_end")
@pytest.mark.parametrize("mode", ["failover", "exclusive"])
def test_a_consumer_that_stops_gives_up_its_topic(frozen_server: InMemoryServer, unique: str, mode: Mode) -> None:
    """The clock stands still, so that no lease ends."""
    seen: list[tuple[str, str]] = []
    for name in ("x", "y"):
        consumer = Consumer(frozen_server.url, group=unique, instance=name)
        consumer.subscribe(unique, mode=mode, start="earliest")(
            lambda message, name=name: seen.append((name, message.text))
        )
        with running(consumer):
            publish(frozen_server.url, unique, [f"for {name}"])
            eventually(lambda name=name: (name, f"for {name}") in seen, "the message to be handled")
    assert seen == [("x", "for x"), ("y", "for y")]


@pytest.mark.usefixtures("patient_end")
@pytest.mark.parametrize("batch", [None, 1])
def test_a_cancelled_consumer_gives_back_what_it_has(
    frozen_server: InMemoryServer, unique: str, batch: int | None
) -> None:
    """The clock stands still: each message waited for its lease, and counted an attempt although nobody had begun."""
    subscribe(frozen_server.url, unique, unique, "failover")
    publish(frozen_server.url, unique, ["begun", "waits", "waits, too"])

    async def scenario() -> None:
        consumer = AsyncConsumer(frozen_server.url, group=unique, instance="x", concurrency=1)
        begun = asyncio.Event()

        async def handle(message: Any) -> None:
            begun.set()
            await asyncio.Event().wait()  # until it is cancelled

        consumer.subscribe(unique, mode="failover", batch=batch)(handle)
        running = asyncio.ensure_future(consumer.run())
        await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    received = Caller(frozen_server.url, unique, "y").receive(unique)
    assert [(m["body"], m["attempt"]) for m in received] == [("begun", 1), ("waits", 1), ("waits, too", 1)]


@pytest.mark.usefixtures("patient_end")
def test_a_consumer_that_waits_no_longer_gives_back_what_no_thread_has_begun(
    frozen_server: InMemoryServer, unique: str
) -> None:
    """A thread continues: its message stays leased."""
    subscribe(frozen_server.url, unique, unique)
    publish(frozen_server.url, unique, ["begun", "waits"])
    consumer = Consumer(frozen_server.url, group=unique, concurrency=1, drain=0)
    has_begun, may_end = threading.Event(), threading.Event()

    @consumer.subscribe(unique)
    def handle(message: ReceivedMessage) -> None:
        has_begun.set()
        may_end.wait(PATIENCE_SECONDS)

    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
    try:
        received = Caller(frozen_server.url, unique, "y").receive(unique)
        assert [(m["body"], m["attempt"]) for m in received] == [("waits", 1)]
    finally:
        may_end.set()


# --- broadcast ------------------------------------------------------------------------------------------------


def test_every_instance_gets_everything(killed_server: ServerProcess, unique: str) -> None:
    url = killed_server.url
    subscribe(url, unique, unique, "broadcast")
    publish(url, unique, ["before anyone asked"])
    x, y = Caller(url, unique, "x"), Caller(url, unique, "y")
    assert x.receive(unique) == y.receive(unique) == []
    publish(url, unique, ["1", "2"])
    of_x, of_y = x.receive(unique), y.receive(unique)
    assert bodies(of_x) == bodies(of_y) == ["1", "2"]
    assert x.settle([*of_x, of_y[0]]) == [200, 200, 200]
    assert x.settle(of_x) == [410, 410]
    killed_server.kill()
    killed_server.start()
    assert x.receive(unique) == []
    again = y.receive(unique)
    assert bodies(again) == ["2"]
    assert y.settle(again, "dead_letter", reason="no") == [200]
    letters = Caller(url, f"{unique}-looker", "z")
    subscribe(url, letters.group, f"dead-letter.{unique}")
    assert y.receive(unique) == [] and letters.receive(f"dead-letter.{unique}") == []
    publish(url, unique, ["3"])
    assert bodies(x.receive(unique)) == bodies(y.receive(unique)) == ["3"]


def test_broadcast_through_the_sdk(server: ServerProcess, unique: str) -> None:
    """A group's consumers get one topic by broadcast and share another."""
    shared = unique + "-shared"
    seen: dict[str, list[str]] = defaultdict(list)
    consumers = []
    for name in ("x", "y"):
        consumer = Consumer(server.url, group=unique, instance=name)

        def on_broadcast(message: ReceivedMessage, name: str = name) -> None:
            seen[name].append(message.text)

        def on_shared(message: ReceivedMessage) -> None:
            seen["shared"].append(message.text)

        consumer.subscribe(unique, mode="broadcast")(on_broadcast)
        consumer.subscribe(shared)(on_shared)
        consumers.append(consumer)
    with running(*consumers):
        for name in ("x", "y"):
            eventually(lambda name=name: is_subscribed(server.url, f"{unique}@{name}"), name)  # type: ignore[misc]
        publish(server.url, unique, [str(n) for n in range(20)])
        publish(server.url, shared, [str(n) for n in range(20)])
        eventually(lambda: all(len(seen[name]) >= 20 for name in ("x", "y", "shared")), "20 messages each")
    assert all(sorted(seen[name], key=int) == [str(n) for n in range(20)] for name in ("x", "y", "shared"))


# --- two consumers with one name ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", pytest.param("failover", marks=pytest.mark.long), "broadcast"])
def test_of_two_consumers_with_one_name_the_newer_receives(memory: InMemoryServer, unique: str, mode: Mode) -> None:
    """As replicas with one fixed name, or a rolling update: each got a part, at the same time, and nobody said so."""
    seen: dict[str, list[str]] = defaultdict(list)

    def made(name: str) -> Consumer:
        consumer = Consumer(memory.url, group=unique, instance="web")
        consumer.subscribe(unique, mode=mode)(lambda message: seen[name].append(message.text))
        return consumer

    older, newer = made("older"), made("newer")
    raised: list[NotifyError] = []

    def run_older() -> None:
        try:
            older.run(signals=False)
        except NotifyError as error:
            raised.append(error)

    thread = threading.Thread(target=run_older)
    thread.start()
    group = f"{unique}@web" if mode == "broadcast" else unique
    eventually(lambda: is_subscribed(memory.url, group), "the older one")
    publish(memory.url, unique, ["a", "b"])
    eventually(lambda: older.handled == 2, "the older one to receive")
    with running(newer):
        thread.join(PATIENCE_SECONDS)
        assert [error.code for error in raised] == ["topic_is_taken"] and "name 'web'" in str(raised[0])
        publish(memory.url, unique, [str(n) for n in range(20)])
        eventually(lambda: newer.handled == 20, "the newer one to receive all")
    assert seen == {"older": ["a", "b"], "newer": [str(n) for n in range(20)]}


def test_a_consumer_that_died_leaves_its_name_and_messages_to_the_next(
    frozen_server: InMemoryServer, unique: str
) -> None:
    """The next one begins with what its predecessor held, and not behind it."""
    subscribe(frozen_server.url, unique, unique, "exclusive")
    publish(frozen_server.url, unique, ["1", "2", "3"])

    def receive(session: str, number: int) -> list[str]:
        request = {"instance": "web", "topics": [unique], "max": 2}
        path = f"/v1/groups/{unique}/receive?subscribe=no&request={session}.{number}"
        return bodies(post(frozen_server.url, path, request)["messages"])

    assert receive("aaaaaaaaaaaa", 1) == ["1", "2"] and receive("aaaaaaaaaaaa", 2) == ["3"]
    assert receive("bbbbbbbbbbbb", 1) == ["1", "2"]
    path, request = f"/v1/groups/{unique}/receive?request=aaaaaaaaaaaa.3", {"instance": "web", "topics": [unique]}
    assert ask(frozen_server.url, "POST", path, request)[0] == 409
    assert receive("bbbbbbbbbbbb", 2) == ["3"]


# --- modes that cannot be, and changes of mode ----------------------------------------------------------------


def test_a_mode_that_is_unknown_or_does_not_fit_is_refused(server: ServerProcess, unique: str) -> None:
    path = f"groups/{unique}/subscriptions/{unique}"
    status, problem = ask(server.url, "PUT", f"/v1/admin/{path}", {"mode": "random", "reason": "a test"})
    assert status == 422 and "mode" in problem["detail"]
    subscribe(server.url, unique, unique, "broadcast")
    subscribe(server.url, unique, unique + "-2")
    assert "broadcast" in refused(Caller(server.url, unique, "x"), 422, "mixed_modes")


def test_a_mode_changes_under_a_running_consumer(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["a1", "a2", "b1"], key=True)
    x = Caller(server.url, unique, "x")
    had = x.receive(unique)
    assert x.settle(had[:1]) == [200]
    path = f"groups/{unique}/subscriptions/{unique}"
    assert refusal(server.url, "PUT", path, mode="ordered") == (409, "mode_in_use")
    subscribe(server.url, unique, unique, "ordered", force=True)
    assert x.settle(had[1:]) == [410, 410]  # delivered again, in order
    again = x.receive(unique)
    assert bodies(again) == ["a2", "b1"]
    assert x.settle(again) == [200, 200]


@pytest.mark.parametrize("topic", ["{}", "{}.*"])
def test_a_consumer_of_another_mode_does_not_switch_an_idle_one(
    frozen_server: InMemoryServer, unique: str, topic: str
) -> None:
    """The first consumer keeps the mode without holding a message, until it has not asked for a minute."""
    url, topic = frozen_server.url, topic.format(unique)
    subscribe(url, unique, unique)
    subscribe(url, unique, topic, "ordered", force=True)
    assert Caller(url, unique, "idle").receive() == []
    path = f"groups/{unique}/subscriptions/{topic}"
    assert refusal(url, "PUT", path, mode="shared") == (409, "mode_in_use")
    frozen_server.advance(61)
    subscribe(url, unique, topic, "shared")
