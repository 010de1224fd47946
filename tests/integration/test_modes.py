"""How the instances of a group share a topic: ordered by key, exclusive, failover, broadcast."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer, Message, ReceivedMessage, TransactionProducer
from notify.errors import Conflict, InvalidRequest, NotifyError
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import Caller, bodies, is_subscribed, publish, subscribe
from tests.support.http import post

# --- ordered --------------------------------------------------------------------------------------------------


def test_of_each_key_one_is_in_flight(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "ordered")
    publish(server.url, unique, ["a1", "b1", "a2", "b2", "a3"], key=True)
    publish(server.url, unique, ["no key", "none either"])
    x, y = Caller(server.url, unique, "x"), Caller(server.url, unique, "y")
    first = x.receive(unique)
    assert bodies(first) == ["a1", "b1", "no key", "none either"]
    assert y.receive(unique) == []
    assert x.settle(first[:1]) == [200]
    second = y.receive(unique)
    assert bodies(second) == ["a2"]
    assert y.settle(second, "retry", delay=0.3) == [200]
    assert y.receive(unique) == []  # a3 waits for a2's retry
    again = y.receive(unique, wait=3)
    assert (bodies(again), again[0]["attempt"]) == (["a2"], 2)
    assert y.settle(again, "dead_letter") == [200]  # which frees its key as well
    assert bodies(y.receive(unique)) == ["a3"]
    assert x.settle(first[1:2]) == [200]
    assert bodies(x.receive(unique, wait=3)) == ["b2"]


def test_an_expired_lease_keeps_its_key(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "ordered")
    publish(server.url, unique, ["a1", "a2"], key=True)
    x = Caller(server.url, unique, "x")
    assert bodies(x.receive(unique, lease=1)) == ["a1"]
    again = x.receive(unique, wait=5)
    assert (bodies(again), again[0]["attempt"]) == (["a1"], 2)
    assert x.settle(again) == [200]
    assert bodies(x.receive(unique)) == ["a2"]


def test_a_waiting_consumer_gets_the_next_of_a_key_at_once(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "ordered")
    publish(server.url, unique, ["a1", "a2"], key=True)
    x, y = Caller(server.url, unique, "x"), Caller(server.url, unique, "y")
    first = x.receive(unique)
    got: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: got.extend(y.receive(unique, wait=20)))
    waiting.start()
    time.sleep(0.2)
    started = time.monotonic()
    x.settle(first)
    waiting.join()
    assert bodies(got) == ["a2"] and time.monotonic() - started < 5


def test_order_survives_a_kill(tmp_path: Path, unique: str) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, unique, unique, "ordered")
        publish(server.url, unique, ["a1", "b1", "a2", "b2"], key=True)
        x = Caller(server.url, unique, "x")
        first = x.receive(unique)
        assert x.settle(first[:1]) == [200]
        server.kill()
        server.start()
        assert bodies(x.receive(unique)) == ["b1", "a2"]
    finally:
        server.stop()


def test_handlers_see_each_key_in_order(server: ServerProcess, unique: str) -> None:
    """Through the SDK, over several queues, two consumers, some failures: every key in its order, all of it."""
    asyncio.run(
        post(server.url, "/v1/messages", {"messages": [{"topic": unique, "body": "first use makes the topic"}]})
    )
    seen: dict[str, list[int]] = defaultdict(list)
    lock = threading.Lock()
    chance = random.Random(7)
    consumers = [Consumer(server.url, group=unique, concurrency=8) for _ in range(2)]

    def handle(message: ReceivedMessage) -> None:
        time.sleep(chance.random() * 0.01)
        if message.attempt == 1 and chance.random() < 0.02:
            raise ValueError("now and then")
        with lock:
            seen[message.key or ""].append(message.json()["n"])

    for consumer in consumers:
        consumer.subscribe(unique, mode="ordered")(handle)
    threads = [threading.Thread(target=c.run, kwargs={"signals": False}) for c in consumers]
    for thread in threads:
        thread.start()
    eventually(lambda: is_subscribed(server.url, unique))
    with TransactionProducer(server.url, group=unique) as producer:
        for n in range(40):
            for key in "abcdefgh":
                producer.publish(Message(unique, {"n": n}, key=key))
    eventually(lambda: sum(map(len, seen.values())) == 320, 60)
    for consumer in consumers:
        consumer.stop()
    for thread in threads:
        thread.join(30)
    assert {key: values == list(range(40)) for key, values in seen.items()} == dict.fromkeys("abcdefgh", True)


# --- exclusive and failover -----------------------------------------------------------------------------------


def test_a_second_instance_is_refused(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "exclusive")
    publish(server.url, unique, ["1", "2"])
    x, y = Caller(server.url, unique, "x"), Caller(server.url, unique, "y")
    assert bodies(x.receive(unique, lease=1, max=1)) == ["1"]
    with pytest.raises(Conflict, match="failover") as refused:
        y.receive(unique)
    assert refused.value.code == "topic_is_taken"
    time.sleep(1.2)  # x is gone: what it had comes first, in its order
    again = y.receive(unique, max=10)
    assert [(m["body"], m["attempt"]) for m in again] == [("1", 2), ("2", 1)]
    with pytest.raises(Conflict):
        x.receive(unique)


def test_a_standby_takes_over_within_the_lease(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "failover")
    publish(server.url, unique, ["1", "2", "3"])
    x, y = Caller(server.url, unique, "x"), Caller(server.url, unique, "y")
    had = x.receive(unique, lease=1, max=2)
    assert bodies(had) == ["1", "2"]
    assert x.settle(had[:1]) == [200]
    assert y.receive(unique) == []
    started = time.monotonic()
    taken = y.receive(unique, wait=20)
    assert [(m["body"], m["attempt"]) for m in taken] == [("2", 2), ("3", 1)]
    assert time.monotonic() - started < 3
    assert x.settle(had[1:]) == [410]
    assert x.receive(unique) == []  # it is the standby now
    assert y.settle(taken) == [200, 200]


def test_a_standby_that_waits_costs_the_active_one_nothing(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "failover")
    x, y = Caller(server.url, unique, "x"), Caller(server.url, unique, "y")
    assert x.receive(unique, lease=2) == []
    standing_by = threading.Thread(target=lambda: y.receive(unique, wait=4))
    standing_by.start()
    for n in range(8):
        publish(server.url, unique, [str(n)])
        got = x.receive(unique, wait=2, lease=2)
        assert bodies(got) == [str(n)]
        x.settle(got)
    standing_by.join()


# --- broadcast ------------------------------------------------------------------------------------------------


def test_every_instance_gets_everything(tmp_path: Path, unique: str) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, unique, unique, "broadcast")
        publish(server.url, unique, ["before anyone asked"])
        x, y = Caller(server.url, unique, "x"), Caller(server.url, unique, "y")
        assert x.receive(unique) == y.receive(unique) == []
        publish(server.url, unique, ["1", "2"])
        of_x, of_y = x.receive(unique), y.receive(unique)
        assert bodies(of_x) == bodies(of_y) == ["1", "2"]
        assert x.settle([*of_x, of_y[0]]) == [200, 200, 200]
        assert x.settle(of_x) == [410, 410]
        server.kill()
        server.start()
        assert x.receive(unique) == []
        again = y.receive(unique)
        assert [(m["body"]) for m in again] == ["2"]
        assert y.settle(again, "dead_letter", reason="no") == [200]
        letters = Caller(server.url, "looker", "z")
        subscribe(server.url, "looker", f"dead-letter.{unique}", "shared")
        assert y.receive(unique) == [] and letters.receive(f"dead-letter.{unique}") == []
        publish(server.url, unique, ["3"])
        assert bodies(x.receive(unique, wait=3)) == bodies(y.receive(unique, wait=3)) == ["3"]
    finally:
        server.stop()


def test_broadcast_through_the_sdk(server: ServerProcess, unique: str) -> None:
    """Beside a shared topic of the same group, in the same consumers."""
    shared = unique + "-shared"
    seen: dict[str, list[str]] = defaultdict(list)
    consumers = []
    for name in ("x", "y"):
        consumer = Consumer(server.url, group=unique, instance=name)

        def everything(message: ReceivedMessage, name: str = name) -> None:
            seen[name].append(message.text)

        def mine(message: ReceivedMessage) -> None:
            seen["shared"].append(message.text)

        consumer.subscribe(unique, mode="broadcast")(everything)
        consumer.subscribe(shared)(mine)
        consumers.append(consumer)
    threads = [threading.Thread(target=c.run, kwargs={"signals": False}) for c in consumers]
    for thread in threads:
        thread.start()
    eventually(lambda: is_subscribed(server.url, f"{unique}@x") and is_subscribed(server.url, f"{unique}@y"))
    publish(server.url, unique, [str(n) for n in range(20)])
    publish(server.url, shared, [str(n) for n in range(20)])
    eventually(lambda: [len(seen[name]) for name in ("x", "y", "shared")] == [20] * 3)
    for consumer in consumers:
        consumer.stop()
    for thread in threads:
        thread.join(30)
    assert all(sorted(seen[name], key=int) == [str(n) for n in range(20)] for name in ("x", "y", "shared"))


# --- and otherwise --------------------------------------------------------------------------------------------


def test_what_cannot_be(server: ServerProcess, unique: str) -> None:
    with pytest.raises(InvalidRequest, match="mode"):
        subscribe(server.url, unique, unique, "random")
    subscribe(server.url, unique, unique, "broadcast")
    subscribe(server.url, unique, unique + "-2", "shared")
    with pytest.raises(InvalidRequest, match="broadcast") as refused:
        post(server.url, f"/v1/groups/{unique}/receive", {"instance": "x"})
    assert refused.value.code == "mixed_modes"


def test_a_mode_changes_under_a_running_consumer(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared")
    publish(server.url, unique, ["a1", "a2", "b1"], key=True)
    x = Caller(server.url, unique, "x")
    had = x.receive(unique)
    assert x.settle(had[:1]) == [200]
    with pytest.raises(NotifyError) as refused:
        subscribe(server.url, unique, unique, "ordered")
    assert refused.value.code == "mode_in_use"
    subscribe(server.url, unique, unique, "ordered", force=True)
    assert x.settle(had[1:]) == [410, 410]  # delivered again, in order
    again = x.receive(unique)
    assert bodies(again) == ["a2", "b1"]
    assert x.settle(again) == [200, 200]
