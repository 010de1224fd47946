"""How the instances of a group share a topic: ordered by key, exclusive, failover, broadcast."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer, Message, ReceivedMessage, TransactionProducer
from notify.client.http import HttpClient
from notify.errors import Conflict, InvalidRequest, NotifyError
from notify.testing.process import ServerProcess
from tests.integration.shop import eventually, post


class Caller:
    """One instance of a group, over plain HTTP."""

    def __init__(self, server: ServerProcess, group: str, instance: str) -> None:
        self.url, self.group, self.instance = server.url, group, instance

    def receive(self, topic: str, wait: float = 0, lease: float = 30, max: int = 100) -> list[dict[str, Any]]:
        request = {"instance": self.instance, "topics": [topic], "max": max, "wait": wait, "lease": lease}
        return self._call(f"/v1/groups/{self.group}/receive", request)["messages"]  # type: ignore[no-any-return]

    def settle(self, messages: list[dict[str, Any]], action: str = "ack", **options: Any) -> list[int]:
        items = [{"receipt": m["receipt"], "action": action, **options} for m in messages]
        return [i["status"] for i in self._call(f"/v1/groups/{self.group}/settle", {"items": items})["items"]]

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(post(self.url, path, body))


def publish(server: ServerProcess, topic: str, bodies: list[str], key: bool = False) -> None:
    messages = [{"topic": topic, "body": b} | ({"key": b[0]} if key else {}) for b in bodies]
    assert all(
        i["status"] == 201 for i in asyncio.run(post(server.url, "/v1/messages", {"messages": messages}))["items"]
    )


def subscribe(server: ServerProcess, group: str, topic: str, mode: str, **fields: Any) -> None:
    async def put() -> None:
        http = HttpClient(server.url)
        try:
            body = json.dumps({"mode": mode, "start": "latest", "reason": "test", **fields}).encode()
            await http.call("PUT", f"/v1/admin/groups/{group}/subscriptions/{topic}", body, 10, "application/json")
        finally:
            http.close()

    asyncio.run(put())


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [m["body"] for m in messages]


# --- ordered --------------------------------------------------------------------------------------------------


def test_of_each_key_one_is_in_flight(server: ServerProcess, unique: str) -> None:
    subscribe(server, unique, unique, "ordered")
    publish(server, unique, ["a1", "b1", "a2", "b2", "a3"], key=True)
    publish(server, unique, ["no key", "none either"])
    x, y = Caller(server, unique, "x"), Caller(server, unique, "y")
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
    subscribe(server, unique, unique, "ordered")
    publish(server, unique, ["a1", "a2"], key=True)
    x = Caller(server, unique, "x")
    assert bodies(x.receive(unique, lease=1)) == ["a1"]
    again = x.receive(unique, wait=5)
    assert (bodies(again), again[0]["attempt"]) == (["a1"], 2)
    assert x.settle(again) == [200]
    assert bodies(x.receive(unique)) == ["a2"]


def test_a_waiting_consumer_gets_the_next_of_a_key_at_once(server: ServerProcess, unique: str) -> None:
    subscribe(server, unique, unique, "ordered")
    publish(server, unique, ["a1", "a2"], key=True)
    x, y = Caller(server, unique, "x"), Caller(server, unique, "y")
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
        subscribe(server, unique, unique, "ordered")
        publish(server, unique, ["a1", "b1", "a2", "b2"], key=True)
        x = Caller(server, unique, "x")
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
    eventually(lambda: _is_subscribed(server, unique))
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


def _is_subscribed(server: ServerProcess, group: str) -> bool:
    async def get() -> bool:
        http = HttpClient(server.url)
        try:
            await http.call("GET", f"/v1/admin/groups/{group}", b"", 5)
            return True
        except NotifyError:
            return False
        finally:
            http.close()

    return asyncio.run(get())


# --- exclusive and failover -----------------------------------------------------------------------------------


def test_a_second_instance_is_refused(server: ServerProcess, unique: str) -> None:
    subscribe(server, unique, unique, "exclusive")
    publish(server, unique, ["1", "2"])
    x, y = Caller(server, unique, "x"), Caller(server, unique, "y")
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
    subscribe(server, unique, unique, "failover")
    publish(server, unique, ["1", "2", "3"])
    x, y = Caller(server, unique, "x"), Caller(server, unique, "y")
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
    subscribe(server, unique, unique, "failover")
    x, y = Caller(server, unique, "x"), Caller(server, unique, "y")
    assert x.receive(unique, lease=2) == []
    standing_by = threading.Thread(target=lambda: y.receive(unique, wait=4))
    standing_by.start()
    for n in range(8):
        publish(server, unique, [str(n)])
        got = x.receive(unique, wait=2, lease=2)
        assert bodies(got) == [str(n)]
        x.settle(got)
    standing_by.join()


# --- broadcast ------------------------------------------------------------------------------------------------


def test_every_instance_gets_everything(tmp_path: Path, unique: str) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server, unique, unique, "broadcast")
        publish(server, unique, ["before anyone asked"])
        x, y = Caller(server, unique, "x"), Caller(server, unique, "y")
        assert x.receive(unique) == y.receive(unique) == []
        publish(server, unique, ["1", "2"])
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
        letters = Caller(server, "looker", "z")
        subscribe(server, "looker", f"dead-letter.{unique}", "shared")
        assert y.receive(unique) == [] and letters.receive(f"dead-letter.{unique}") == []
        publish(server, unique, ["3"])
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
    eventually(lambda: _is_subscribed(server, f"{unique}@x") and _is_subscribed(server, f"{unique}@y"))
    publish(server, unique, [str(n) for n in range(20)])
    publish(server, shared, [str(n) for n in range(20)])
    eventually(lambda: [len(seen[name]) for name in ("x", "y", "shared")] == [20] * 3)
    for consumer in consumers:
        consumer.stop()
    for thread in threads:
        thread.join(30)
    assert all(sorted(seen[name], key=int) == [str(n) for n in range(20)] for name in ("x", "y", "shared"))


# --- and otherwise --------------------------------------------------------------------------------------------


def test_what_cannot_be(server: ServerProcess, unique: str) -> None:
    with pytest.raises(InvalidRequest, match="mode"):
        subscribe(server, unique, unique, "random")
    subscribe(server, unique, unique, "broadcast")
    subscribe(server, unique, unique + "-2", "shared")
    with pytest.raises(InvalidRequest, match="broadcast") as refused:
        asyncio.run(post(server.url, f"/v1/groups/{unique}/receive", {"instance": "x"}))
    assert refused.value.code == "mixed_modes"


def test_a_mode_changes_under_a_running_consumer(server: ServerProcess, unique: str) -> None:
    subscribe(server, unique, unique, "shared")
    publish(server, unique, ["a1", "a2", "b1"], key=True)
    x = Caller(server, unique, "x")
    had = x.receive(unique)
    assert x.settle(had[:1]) == [200]
    with pytest.raises(NotifyError) as refused:
        subscribe(server, unique, unique, "ordered")
    assert refused.value.code == "mode_in_use"
    subscribe(server, unique, unique, "ordered", force=True)
    assert x.settle(had[1:]) == [410, 410]  # delivered again, in order
    again = x.receive(unique)
    assert bodies(again) == ["a2", "b1"]
    assert x.settle(again) == [200, 200]
