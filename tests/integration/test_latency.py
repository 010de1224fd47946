"""How long messages take: metrics, admin routes, pages and commands say what consumers measured, to a bucket."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from notify.admin_api.words import latency
from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.protocol.latency import SHARES, quantile
from notify.server.latency import KINDS
from notify.server.running import Running
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import run
from tests.support.groups import Caller, publish, running, subscribe
from tests.support.http import admin, call, post
from tests.support.latency import bucket, counts
from tests.support.transactions import half_request, new_id

SLOW_SECONDS = 0.03


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of this module, because only the first groups and topics that it sees have series of their own."""
    process = ServerProcess(tmp_path_factory.mktemp("latency") / "data").start()
    yield process
    process.stop()


def assert_alike(measured: Sequence[float], shown: dict[str, Any]) -> None:
    """Each share lies at most a bucket from that of these durations."""
    assert shown["count"] == len(measured)
    for name, share in SHARES.items():
        exact = sorted(measured)[max(0, round(share * len(measured)) - 1)]
        assert abs(bucket(exact) - bucket(shown[name])) <= 1, (name, exact, shown)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["threads", "coroutines", "batches"])
def test_a_handlers_time_is_the_same_everywhere(timed: ServerProcess, unique: str, kind: str) -> None:
    measured: list[float] = []
    consumer: Any = (AsyncConsumer if kind == "coroutines" else Consumer)(timed.url, group=unique, concurrency=4)

    def handle(message: ReceivedMessage) -> None:
        began = time.perf_counter()
        time.sleep(SLOW_SECONDS)  # how slow the handler is
        measured.append(time.perf_counter() - began)

    async def await_it(message: ReceivedMessage) -> None:
        began = time.perf_counter()
        await asyncio.sleep(SLOW_SECONDS)  # how slow the handler is
        measured.append(time.perf_counter() - began)

    def handle_all(messages: list[ReceivedMessage]) -> None:
        began = time.perf_counter()
        time.sleep(SLOW_SECONDS)  # how slow the handler is
        measured.extend([time.perf_counter() - began] * len(messages))

    function = {"threads": handle, "coroutines": await_it, "batches": handle_all}[kind]
    consumer.subscribe(unique, start="earliest", **({"batch": 8} if kind == "batches" else {}))(function)
    subscribe(timed.url, unique, unique)
    publish(timed.url, unique, [str(n) for n in range(40)])

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = admin(timed.url, "GET", f"groups/{unique}")["latency"]
        return found

    with running(consumer):
        eventually(lambda: {(figures or {}).get("count") for figures in shown().values()} == {40}, "all to be counted")
    assert list(shown()) == ["commit_to_consumer", "consumer_to_handler", "handler", "commit_to_ack"]
    assert_alike(measured, shown()["handler"])
    for name, figures in shown().items():
        in_metrics = counts(timed.url, name, unique)
        assert sum(in_metrics) == 40
        assert quantile(in_metrics, 0.99) == pytest.approx(figures["p99"], abs=1e-6), "the group is new: both are alike"
    assert sum(counts(timed.url, "commit_to_queue", unique)) == 40
    p99 = latency(shown()["commit_to_ack"]["p99"])
    assert p99 in str(call(timed.url, "GET", f"/groups/{unique}"))
    assert p99 in str(call(timed.url, "GET", f"/groups?prefix={unique}"))


def test_a_group_of_the_busiest_is_in_top_with_its_figures(timed: ServerProcess, unique: str) -> None:
    subscribe(timed.url, unique, unique)
    publish(timed.url, unique, ["x"] * 3)
    caller = Caller(timed.url, unique, "i")
    caller.settle(caller.receive(unique, max=2))
    row = admin(timed.url, "GET", f"groups?prefix={unique}")["groups"][0]
    screen = run(["top", "--rounds", "1", "--url", timed.url]).stdout
    line = next(line for line in screen.splitlines() if line.startswith(unique))  # its topic comes after it
    acked = row["latency"]["commit_to_ack"]
    assert latency(acked["p50"]) in line and latency(acked["p99"]) in line
    assert acked["count"] == 2 and row["latency"]["handler"] is None


def test_only_the_first_delivery_of_a_message_counts_as_its_way_to_a_consumer(
    timed: ServerProcess, unique: str
) -> None:
    subscribe(timed.url, unique, unique, retry_min=0.01, retry_max=0.1)
    publish(timed.url, unique, ["x", "y"])
    caller = Caller(timed.url, unique, "i")
    caller.settle(caller.receive(unique), "retry", delay=0)
    again = caller.receive(unique, wait=10)
    assert [message["attempt"] for message in again] == [2, 2]
    caller.settle(again)
    assert sum(counts(timed.url, "commit_to_consumer", unique)) == 2 == sum(counts(timed.url, "commit_to_ack", unique))


def test_a_delay_does_not_count_as_latency(timed: ServerProcess, unique: str) -> None:
    subscribe(timed.url, unique, unique)
    post(timed.url, "/v1/messages", {"messages": [{"topic": unique, "body": "x", "delay": 1.5}]})
    caller = Caller(timed.url, unique, "i")
    caller.settle(caller.receive(unique, wait=20))
    acked = admin(timed.url, "GET", f"groups/{unique}")["latency"]["commit_to_ack"]
    assert acked["count"] == 1 and acked["p99"] < 1.5
    assert counts(timed.url, "commit_to_queue", unique) == []


@pytest.mark.parametrize(
    "query", ["", "?handled=nonsense&waited=", "?handled=1_99.1", "?handled", "?%ff=1&more=2", "?" + "&" * 50]
)
def test_a_settlement_is_taken_whatever_its_query_says(timed: ServerProcess, unique: str, query: str) -> None:
    """Older clients send none, others may send anything: what is settled does not depend on it."""
    subscribe(timed.url, unique, unique)
    publish(timed.url, unique, ["x"])
    (message,) = Caller(timed.url, unique, "i").receive(unique)
    items = {"items": [{"receipt": message["receipt"], "action": "ack"}]}
    answer = post(timed.url, f"/v1/groups/{unique}/settle{query}", items)
    assert [item["status"] for item in answer["items"]] == [200]
    assert sum(counts(timed.url, "handler", unique)) == 0


def test_a_client_in_any_language_may_report_its_times(timed: ServerProcess, unique: str) -> None:
    subscribe(timed.url, unique, unique)
    publish(timed.url, unique, ["x"])
    (message,) = Caller(timed.url, unique, "i").receive(unique)
    items = {"items": [{"receipt": message["receipt"], "action": "ack"}]}
    post(timed.url, f"/v1/groups/{unique}/settle?handled=61000_5.1_4.2&waited=3_0.3", items)
    figures = admin(timed.url, "GET", f"groups/{unique}")["latency"]
    assert figures["handler"]["count"] == 3 == figures["consumer_to_handler"]["count"]
    assert 0.02 < figures["handler"]["p99"] <= 0.05


def test_check_backs_and_requests_are_timed(timed: ServerProcess, unique: str) -> None:
    half = half_request(unique, new_id(), topic=unique)
    half["transactions"][0]["check_after"] = 0.5
    post(timed.url, "/v1/transactions", half)
    asked = {"producer_group": unique, "instance": "i", "wait": 30}
    (check,) = post(timed.url, "/v1/checks/poll", asked)["checks"]
    outcome = {"id": check["id"], "outcome": "COMMIT", "check": check["token"]}
    post(timed.url, "/v1/transactions/outcomes", {"producer_group": unique, "outcomes": [outcome]})
    assert sum(counts(timed.url, "check_back", unique)) == 1
    assert sum(counts(timed.url, "request", "POST /v1/transactions/outcomes")) >= 1
    assert counts(timed.url, "request", "POST /v1/checks/poll") == [], "a poll waits on purpose"


def test_every_kind_is_shown_as_a_histogram(timed: ServerProcess) -> None:
    text = str(call(timed.url, "GET", "/metrics"))
    assert all(f"# TYPE notify_{kind.name}_seconds histogram\n" in text for kind in KINDS)


@pytest.mark.long
def test_many_topics_and_groups_make_no_more_series_than_the_reference_says() -> None:
    """10,000 topics with a message, and 1,000 groups with a lag, a dead letter and a figure of every kind."""
    with InMemoryServer() as server:
        topics = [f"topic.{n}" for n in range(10_000)]
        for first in range(0, len(topics), 2_000):
            messages = [{"topic": topic, "body": "x"} for topic in topics[first : first + 2_000]]
            post(server.url, "/v1/messages", {"messages": messages})
        for n in range(1_000):
            subscribe(server.url, f"group.{n}", topics[n], start="earliest", max_attempts=1)

        async def timed_all(running: Running) -> None:
            groups = [f"group.{n}" for n in range(1_000)]
            for kind in KINDS:
                for name in {"topic": topics, "route": []}.get(kind.label, groups):
                    running.core.metrics.latencies[kind.name].of(name).add(3_000)

        server.inside(timed_all)
        for n in range(200):
            caller = Caller(server.url, f"group.{n}", "i")
            caller.settle(caller.receive(topics[n]), "dead_letter", reason="a test")
        text = str(call(server.url, "GET", "/metrics"))
    series = [line for line in text.splitlines() if not line.startswith("#")]
    most = re.search(r"all of `/metrics` has fewer than ([\d,]+) series", reference())
    assert most is not None and len(series) < int(most[1].replace(",", "")), len(series)
    assert metric_lines(text, "notify_lag_messages") == metric_lines(text, "notify_dead_letters") == 100


def metric_lines(text: str, name: str) -> int:
    return sum(line.startswith(f"{name}{{") for line in text.splitlines())


def reference() -> str:
    return (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
