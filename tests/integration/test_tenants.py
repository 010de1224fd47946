"""Tenants that take turns on a server: over HTTP, by command, in console and metrics, after a kill, by the SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.errors import InvalidRequest
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, bodies, publish, running, subscribe, taken_by
from tests.support.http import admin, ask, metric, post, refusal
from tests.support.servers import stop_if_running


def tenants(url: str, group: str, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = admin(url, "GET", f"groups/{group}/tenants{query}")
    return found


def of_tenants(url: str, topic: str, counts: dict[str, int]) -> None:
    """Send so many messages of each tenant, which a header names."""
    messages = [
        {"topic": topic, "body": f"{tenant}{n}", "headers": {"tenant": tenant}}
        for tenant, count in counts.items()
        for n in range(count)
    ]
    assert {item["status"] for item in post(url, "/v1/messages", {"messages": messages})["items"]} == {201}


@pytest.mark.parametrize("mode", ["shared", "ordered"])
def test_who_waits_is_shown_everywhere(
    notify_server: InMemoryServer, unique: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = notify_server.url
    monkeypatch.setenv("NOTIFY_URL", url)
    status, told = cli("group", "subscribe", unique, unique, "--mode", mode, "--fair-by", "header:tenant",
                       "--reason", "test")  # fmt: skip
    assert status == 0 and f"mode {mode}. Tenants take turns by header:tenant." in " ".join(told["text"].split())
    of_tenants(url, unique, {"large<": 60, "b": 3, "c": 2})
    publish(url, unique, ["nobody's"])
    caller = Caller(url, unique, "x")
    got = bodies(caller.receive(unique, max=8, wait=30))
    assert got == ["large<0", "large<1", "b0", "b1", "c0", "c1", "nobody's", "large<2"]
    answer = tenants(url, unique)
    assert [(row["tenant"], row["waiting"]) for row in answer["tenants"]] == [("large<", 57), ("b", 1)]
    assert (answer["of"], answer["waiting"]) == (2, 58) and answer["tenants"][0]["oldest_at"].endswith("Z")
    assert tenants(url, unique, "?max=1")["of"] == 2
    assert tenants(url, unique, "?topic=another")["of"] == 0
    labels = f'{{group="{unique}",topic="{unique}"}}'
    assert metric(url, f"notify_waiting_tenants{labels}") == 2
    assert metric(url, f"notify_largest_tenant_share{labels}") == 57 / 58
    status, listed = cli("group", "tenants", unique)
    assert status == 0 and "large<" in listed["text"] and "57" in listed["text"]
    assert cli("group", "tenants", unique, "--topic", unique, "--max", "1", "--json")[1]["of"] == 2
    page = str(ask(url, "GET", f"/groups/{unique}")[1])
    assert "large&lt;" in page and "fair by header:tenant" in page and "2 tenants have 58 messages" in page
    assert admin(url, "GET", f"groups/{unique}")["subscriptions"][0]["fair_by"] == "header:tenant"
    message = next(m for m in admin(url, "GET", f"messages?topic={unique}")["messages"] if m["body"] == "b2")
    assert admin(url, "GET", f"messages/{message['id']}")["groups"][0]["state"] == "waiting"


def test_groups_without_turns_have_no_tenants(notify_server: InMemoryServer, unique: str) -> None:
    subscribe(notify_server.url, unique, unique)
    assert tenants(notify_server.url, unique) == {"tenants": [], "of": 0, "waiting": 0}
    assert "Waiting tenants" not in str(ask(notify_server.url, "GET", f"/groups/{unique}")[1])
    assert ask(notify_server.url, "GET", f"/v1/admin/groups/{unique}-none/tenants")[0] == 404
    assert ask(notify_server.url, "GET", f"/v1/admin/groups/{unique}/tenants?max=101")[0] == 422


def test_an_invalid_fair_by_is_refused(notify_server: InMemoryServer, unique: str) -> None:
    path = f"groups/{unique}/subscriptions/{unique}"
    for mode, fair_by in (("broadcast", "key"), ("exclusive", "key"), ("shared", "tenant"), ("shared", "header:")):
        body = {"mode": mode, "fair_by": fair_by}
        status, problem = ask(notify_server.url, "PUT", f"/v1/{path}", body)
        assert (status, problem["code"]) == (422, "invalid_schema")
        assert refusal(notify_server.url, "PUT", path, **body)[0] == 422


def test_a_change_waits_for_consumers(notify_server: InMemoryServer, unique: str) -> None:
    url = notify_server.url
    subscribe(url, unique, unique, fair_by="key")
    publish(url, unique, ["a1"], key=True)
    assert bodies(Caller(url, unique, "x").receive(unique, wait=30)) == ["a1"]
    path = f"groups/{unique}/subscriptions/{unique}"
    assert refusal(url, "PUT", path, mode="shared") == (409, "mode_in_use")
    admin(url, "PUT", path, {"mode": "shared", "force": True})
    assert bodies(Caller(url, unique, "x").receive(unique, wait=30)) == ["a1"]


@pytest.mark.parametrize("is_killed", [True, False])
def test_turns_outlast_the_server(tmp_path: Path, unique: str, is_killed: bool) -> None:
    server = ServerProcess(tmp_path).start()
    try:
        url = server.url
        subscribe(url, unique, unique, fair_by="header:tenant", retry_min=0.01, retry_max=0.01)
        of_tenants(url, unique, {"large": 40, "b": 2})
        caller = Caller(url, unique, "x")
        got = caller.receive(unique, max=4, wait=30)
        assert bodies(got) == ["large0", "large1", "b0", "b1"]
        assert caller.settle(got[1:3]) == [200, 200]
        assert caller.settle(got[3:], "retry", delay=0) == [200]
        of_tenants(url, unique, {"c": 1})
        if is_killed:
            server.kill()
        else:
            server.stop()
        server.start()
        again = {m["body"]: m["attempt"] for m in caller.receive(unique, max=6, wait=30)}
        assert {"large0", "b1", "c0"} <= again.keys() and again.keys().isdisjoint({"large1", "b0"})
        assert again["b1"] == 2
    finally:
        stop_if_running(server)


def test_consumers_ask_for_it(notify_server: InMemoryServer, unique: str) -> None:
    url = notify_server.url
    handled: list[str] = []
    consumer = Consumer(url, group=unique, concurrency=1)

    @consumer.subscribe(unique, start="earliest", fair_by="header:tenant")
    def handle(message: ReceivedMessage) -> None:
        handled.append(message.headers["tenant"])

    of_tenants(url, unique, {"large": 200, "b": 2})
    with running(consumer):
        eventually(lambda: consumer.handled == 202, "all messages")
    assert "b" not in handled[100:]


def test_an_async_consumer_asks_for_it(notify_server: InMemoryServer, unique: str) -> None:
    consumer = AsyncConsumer(notify_server.url, group=unique)
    consumer.subscribe(unique, mode="ordered", fair_by="key")(taken_by(consumer, print))
    with running(consumer, subscribed=True):
        pass
    (subscription,) = admin(notify_server.url, "GET", f"groups/{unique}")["subscriptions"]
    assert (subscription["mode"], subscription["fair_by"]) == ("ordered", "key")


@pytest.mark.parametrize("options", [{"fair_by": "tenant"}, {"mode": "failover", "fair_by": "key"}, {"fair_by": None}])
def test_a_consumer_refuses_what_no_server_takes(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="fair_by"):
        Consumer("http://127.0.0.1:1", group="g").subscribe("t", **options)


def test_kafka_refuses_in_one_sentence() -> None:
    consumer = Consumer("kafka://127.0.0.1:1", group="g")
    consumer.subscribe("t", fair_by="key")(print)
    with pytest.raises(InvalidRequest, match="needs the queues of a Notify server"):
        consumer.run(signals=False)
