"""Bounds for producers and consumers: rates, backlogs, time to live, delay, priorities, filters."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Message, ReceivedMessage, TransactionProducer
from notify.errors import Backpressure, InvalidRequest, NotifyError
from notify.server.delivery import cursor
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import Caller, bodies, drain, lag, publish, running, subscribe
from tests.support.http import admin, ask, metric, refusal
from tests.support.servers import stop_if_running
from tests.support.shop import Order, items


@pytest.fixture
def limits(frozen_server: InMemoryServer) -> Iterator[Callable[..., None]]:
    """Sets rate limits of the frozen server, and removes them afterwards."""
    yield lambda **limits: admin(frozen_server.url, "PUT", "limits", limits)
    admin(frozen_server.url, "PUT", "limits", {})


# --- rates ----------------------------------------------------------------------------------------------------


def test_a_producer_over_its_rate_is_told_when_to_come_back(
    frozen_server: InMemoryServer, unique: str, limits: Callable[..., None]
) -> None:
    limits(topics={unique: 5})
    with TransactionProducer(frozen_server.url, group=unique) as producer:
        for _ in range(5):
            producer.publish(Message(unique, "x"))
        with pytest.raises(Backpressure) as refused:
            producer.publish(Message(unique, "x"))
        assert refused.value.code == "rate_limited" and refused.value.retryable
        assert refused.value.retry_after == pytest.approx(0.2, abs=0.001)
        frozen_server.advance(0.1)
        with pytest.raises(Backpressure):
            producer.publish(Message(unique, "too soon"))
        frozen_server.advance(refused.value.retry_after - 0.1)
        producer.publish(Message(unique, "x"))
    limits(producer_groups={unique: 1e6})
    assert admin(frozen_server.url, "GET", "limits")["producer_groups"] == {unique: 1e6}


def test_a_refused_half_fails_the_commit_and_nothing_is_sent(
    frozen_server: InMemoryServer, unique: str, limits: Callable[..., None], sqlite_engine: sa.Engine
) -> None:
    """Backpressure reaches the code that commits, as an error that may be tried again."""
    subscribe(frozen_server.url, unique, unique)
    limits(producer_groups={unique: 1})
    with TransactionProducer(frozen_server.url, group=unique, engine=sqlite_engine) as producer:

        def place(item: str) -> None:
            with Session(sqlite_engine) as session, session.begin():
                session.add(Order(item=item))
                producer.send(session, Message(unique, item))

        place("first")
        with pytest.raises(Backpressure) as refused:
            place("second")
        frozen_server.advance(refused.value.retry_after)
        place("third")
    assert items(sqlite_engine) == ["first", "third"]
    assert bodies(drain(frozen_server.url, unique, unique, 2)) == ["first", "third"]


def test_the_answer_to_curl_carries_retry_after(
    frozen_server: InMemoryServer, unique: str, limits: Callable[..., None]
) -> None:
    limits(topics={unique: 2})
    data = json.dumps({"messages": [{"topic": unique, "body": str(n)} for n in range(4)]}).encode()
    request = urllib.request.Request(f"{frozen_server.url}/v1/messages", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        items = json.loads(answer.read())["items"]
        assert [i["status"] for i in items] == [201, 201, 429, 429]
        assert items[2]["code"] == "rate_limited" and items[2]["retry_after"] == pytest.approx(0.5, abs=0.001)
        assert answer.headers["retry-after"] == "1"


def test_a_group_is_given_no_more_than_its_rate(
    frozen_server: InMemoryServer, unique: str, limits: Callable[..., None]
) -> None:
    subscribe(frozen_server.url, unique, unique)
    publish(frozen_server.url, unique, [str(n) for n in range(60)])
    limits(consumer_groups={unique: 20})
    caller = Caller(frozen_server.url, unique, "i")
    given = []
    for _ in range(4):
        given.append(len(caller.receive(unique)))
        assert caller.receive(unique) == []
        frozen_server.advance(0.5)
    assert given == [20, 10, 10, 10]  # messages for one second at once, then as many as the rate allows
    assert refusal(frozen_server.url, "PUT", "limits", topics={unique: 0})[0] == 422


# --- backlogs -------------------------------------------------------------------------------------------------


def test_a_full_backlog_refuses_until_the_group_has_caught_up(frozen_server: InMemoryServer, unique: str) -> None:
    subscribe(frozen_server.url, unique, unique)
    admin(frozen_server.url, "PUT", f"topics/{unique}", {"backlog": 10, "backlog_policy": "refuse"})
    with TransactionProducer(frozen_server.url, group=unique) as producer:
        for n in range(10):
            producer.publish(Message(unique, str(n)))
        with pytest.raises(Backpressure, match="backlog") as refused:
            producer.publish(Message(unique, "one too many"))
        assert refused.value.code == "backlog_full"
        caller = Caller(frozen_server.url, unique, "i")
        assert caller.settle(caller.receive(unique)) == [200] * 10
        frozen_server.advance(refused.value.retry_after)
        producer.publish(Message(unique, "room again"))
    assert refusal(frozen_server.url, "PUT", f"topics/{unique}", backlog=10, backlog_policy="nonsense")[0] == 422


class Publishing:
    """Sends one message in a thread; `status` is the answer's, once there is one."""

    def __init__(self, url: str, topic: str) -> None:
        self.status = 0
        self._request = (url, "POST", "/v1/messages", {"messages": [{"topic": topic, "body": "x"}]})
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def _publish(self) -> None:
        self.status = ask(*self._request)[1]["items"][0]["status"]


def test_hold_makes_the_producer_wait_for_room(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    subscribe(url, unique, unique)
    admin(url, "PUT", f"topics/{unique}", {"backlog": 5, "backlog_policy": "hold"})
    publish(url, unique, [str(n) for n in range(5)])
    caller = Caller(url, unique, "i")
    held = caller.receive(unique)
    waiting = Publishing(url, unique)
    eventually(lambda: frozen_server.under_way("/v1/messages") == 1, "the request to arrive")
    admin(url, "GET", f"topics/{unique}")  # a request that is not held is answered before a later one
    assert frozen_server.under_way("/v1/messages") == 1
    caller.settle(held)
    frozen_server.advance(1)
    eventually(lambda: waiting.status == 201, "room for the held request")
    publish(url, unique, [str(n) for n in range(4)])
    in_vain = Publishing(url, unique)

    def refused_at_last() -> bool:
        frozen_server.advance(0.5)
        return in_vain.status == 429

    eventually(refused_at_last, "the held request to be given up")
    assert metric(url, "notify_refused_backlog_total") > 0


def test_drop_oldest_lets_go_and_counts(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    admin(server.url, "PUT", f"topics/{unique}", {"backlog": 10, "backlog_policy": "drop_oldest"})
    publish(server.url, unique, [str(n) for n in range(50)])
    eventually(
        lambda: admin(server.url, "GET", f"topics/{unique}")["queues"][0]["start"] == 40, "the oldest to be dropped"
    )
    assert bodies(Caller(server.url, unique, "i").receive(unique)) == [str(n) for n in range(40, 50)]


def test_a_backlog_below_what_is_stored_is_refused_and_drops_nothing(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, [str(n) for n in range(20)])
    for policy in ("refuse", "drop_oldest"):
        refused = refusal(server.url, "PUT", f"topics/{unique}", backlog=19, backlog_policy=policy)
        assert refused == (422, "backlog_below_stored")
    assert len(Caller(server.url, unique, "i").receive(unique)) == 20


# --- time -----------------------------------------------------------------------------------------------------


def test_expired_messages_are_passed_over(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    subscribe(url, unique, unique)
    with TransactionProducer(url, group=unique) as producer:
        producer.publish(Message(unique, "short", ttl=0.2))
        producer.publish(Message(unique, "long", ttl=60))
        producer.publish(Message(unique, "for ever"))
        producer.publish(Message(unique, "delayed, then short", ttl=0.2, delay=0.5))
        with pytest.raises(NotifyError, match="ttl"):
            producer.publish(Message(unique, "none", ttl=0))
    frozen_server.advance(0.5)
    frozen_server.advance(0.2)
    caller = Caller(url, unique, "i")
    assert bodies(caller.receive(unique)) == ["long", "for ever"]
    admin(url, "PUT", f"topics/{unique}", {"ttl": 1})
    publish(url, unique, ["of the topic"])
    frozen_server.advance(1)
    assert caller.receive(unique) == []
    queue = admin(url, "GET", f"groups/{unique}")["queues"][0]
    assert (queue["position"], queue["settled_above"]) == (1, 2)  # expired: settled; leased: not


def test_a_ttl_shorter_than_the_retry_is_refused(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, retry_min=5)
    assert refusal(server.url, "PUT", f"topics/{unique}", ttl=4) == (422, "ttl_below_retry")
    admin(server.url, "PUT", f"topics/{unique}", {"ttl": 6})
    path = f"groups/{unique}/subscriptions/{unique}"
    assert refusal(server.url, "PUT", path, retry_min=7) == (422, "ttl_below_retry")
    assert refusal(server.url, "PUT", path, retry_min=5, retry_max=4) == (422, "out_of_bounds")


def test_delay_and_deliver_at_inside_a_transaction_with_keys(
    frozen_server: InMemoryServer, unique: str, sqlite_engine: sa.Engine
) -> None:
    subscribe(frozen_server.url, unique, unique, "ordered")
    with TransactionProducer(frozen_server.url, group=unique, engine=sqlite_engine) as producer:
        with Session(sqlite_engine) as session, session.begin():
            producer.send(session, Message(unique, "later", key="k", delay=1.0))
            producer.send(session, Message(unique, "now", key="k"))
            at = frozen_server.now + timedelta(seconds=0.5)
            producer.send(session, Message(unique, "at", key="k", deliver_at=at))
            producer.send(session, Message(unique, "in 40 days", key="k", delay=40 * 86_400))
    caller = Caller(frozen_server.url, unique, "i")
    for body in ("now", "at", "later"):
        received = caller.receive(unique)
        assert bodies(received) == [body]
        assert caller.settle(received) == [200]
        frozen_server.advance(0.499)
        assert caller.receive(unique) == []
        frozen_server.advance(0.001)
    frozen_server.advance(40 * 86_400 - 1.502)
    assert caller.receive(unique) == []
    frozen_server.advance(0.002)
    assert bodies(caller.receive(unique)) == ["in 40 days"]


def test_a_retry_keeps_its_time_over_a_restart(unique: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, unique, unique)
        publish(server.url, unique, ["in ten minutes", "at once", "soon"])
        caller = Caller(server.url, unique, "i")
        messages = caller.receive(unique)
        for message, delay in zip(messages, (600, 0, 1), strict=True):
            assert caller.settle([message], "retry", delay=delay) == [200]
        server.kill()
        server.start()
        again = []
        while len(again) < 2:
            again += (received := caller.receive(unique, wait=30))
            assert received, f"waited for two messages; came: {bodies(again)}"
        assert {(m["body"], m["attempt"]) for m in again} == {("at once", 2), ("soon", 2)}
    finally:
        stop_if_running(server)


# --- filters and priorities -----------------------------------------------------------------------------------


def test_filters_by_header_and_tag(server: ServerProcess, unique: str) -> None:
    seen: list[tuple[str, str]] = []
    subscriptions: dict[str, dict[str, Any]] = {
        f"{unique}-eu": {"filter": 'has(headers.region) && headers.region == "eu"'},
        f"{unique}-big": {"filter": 'int(headers["n"]) >= 3', "tags": ["vip"]},
    }
    consumers = []
    for group, options in subscriptions.items():
        consumer = Consumer(server.url, group=group)

        @consumer.subscribe(unique, start="earliest", **options)
        def on_message(message: ReceivedMessage, group: str = group) -> None:
            seen.append((group.removeprefix(f"{unique}-"), message.text))

        consumers.append(consumer)
    with TransactionProducer(server.url, group=unique) as producer:
        for n in range(6):
            headers = {"region": "eu" if n % 2 else "us", "n": str(n)}
            producer.publish(Message(unique, str(n), headers=headers, tag="vip" if n != 4 else None))
        producer.publish(Message(unique, "no headers", tag="vip"))
    with running(*consumers, subscribed=True):
        for group in subscriptions:  # without lag, every message was handled or passed over
            eventually(lambda group=group: lag(server.url, group) == 0, f"{group} to have no lag")  # type: ignore[misc]
    assert sorted(seen) == [("big", "3"), ("big", "5"), ("eu", "1"), ("eu", "3"), ("eu", "5")]


@pytest.mark.parametrize("text", ["headers.region ==", "nope == 1", "1 + 1", "x" * 1001, '"text"'])
def test_a_filter_that_cannot_be_is_refused(server: ServerProcess, unique: str, text: str) -> None:
    path = f"groups/{unique}/subscriptions/{unique}"
    assert refusal(server.url, "PUT", path, filter=text) == (422, "invalid_filter")


def test_a_filter_passes_over_a_large_backlog(
    frozen_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only match lies behind more messages than the server scans in one go."""
    monkeypatch.setattr(cursor, "MOST_SKIPPED", 1000)
    monkeypatch.setattr(cursor, "MOST_EVALUATED", 400)
    url, by_filter = frozen_server.url, f"{unique}-cel"
    subscribe(url, unique, unique, tags=["rare"])
    subscribe(url, by_filter, unique, filter='tag == "rare"')
    publish(url, unique, ["x"] * 2500)
    with TransactionProducer(url, group=unique) as producer:
        producer.publish(Message(unique, "found", tag="rare"))
    for group in (unique, by_filter):
        caller = Caller(url, group, "i")
        assert caller.receive(unique) == []
        assert bodies(caller.receive(unique, wait=50)) == ["found"]


def test_priorities_are_changed_while_consumers_run(server: ServerProcess, unique: str) -> None:
    topics = [f"{unique}-high", f"{unique}-low"]
    for topic in topics:
        subscribe(server.url, unique, topic)
    classes = [{"name": "high", "topics": ["*-high"]}, {"name": "normal"}, {"name": "low", "topics": ["*-low"]}]
    answer = admin(server.url, "PUT", f"groups/{unique}/priorities", {"classes": classes})
    assert [c["weight"] for c in answer["result"]["classes"]] == [6, 3, 1]
    for topic in topics:
        publish(server.url, topic, ["x"] * 3000)

    def share_of_high(count: int) -> float:
        received: list[str] = []
        caller = Caller(server.url, unique, "i")
        while len(received) < count:
            messages = caller.receive(*topics, max=70)
            caller.settle(messages)
            received += [m["topic"] for m in messages]
        return received.count(f"{unique}-high") / len(received)

    assert abs(share_of_high(1400) - 6 / 7) < 0.05
    classes = [{"name": "high", "topics": ["*-high"], "weight": 1}, {"name": "low", "topics": ["*-low"], "weight": 1}]
    path = f"groups/{unique}/priorities"
    admin(server.url, "PUT", path, {"classes": classes})
    assert abs(share_of_high(1400) - 0.5) < 0.05
    assert refusal(server.url, "PUT", path, classes=[{"name": "a", "weight": 0}])[0] == 422
    assert refusal(server.url, "PUT", path, classes=[]) == (422, "invalid_schema")
    assert refusal(server.url, "PUT", path, classes=[{"name": "a"}, {"name": "a"}]) == (422, "invalid_priorities")
    assert refusal(server.url, "PUT", path, classes=[{"name": str(n)} for n in range(4)]) == (422, "invalid_priorities")


def test_topics_made_on_the_fly_are_consumed_by_a_pattern(server: ServerProcess, unique: str) -> None:
    seen: list[str] = []
    consumer = Consumer(server.url, group=unique)

    @consumer.subscribe(f"{unique}.*")
    def on_task(message: ReceivedMessage) -> None:
        seen.append(message.topic)

    # A consumer subscribes as it starts; here the subscription must exist before the first topic.
    admin(server.url, "PUT", f"groups/{unique}/subscriptions/{unique}.*", {})
    with running(consumer), TransactionProducer(server.url, group=unique) as producer:
        for n in range(20):
            producer.publish(Message(f"{unique}.{n}", "x"))
        eventually(lambda: len(seen) >= 20, "a message of each topic")
    assert sorted(seen) == sorted(f"{unique}.{n}" for n in range(20))
    admin(server.url, "DELETE", f"groups/{unique}/subscriptions/{unique}.*", {})
    with pytest.raises(InvalidRequest, match="pattern"):
        consumer.subscribe("x*", mode="broadcast")


def test_a_consumer_with_a_pattern_leaves_the_other_topics_of_its_group_to_others(
    server: ServerProcess, unique: str
) -> None:
    """It had no handler for them, and made dead letters of messages while the service that has one was down."""
    seen: list[str] = []
    other, with_pattern = Consumer(server.url, group=unique), Consumer(server.url, group=unique)

    def subscribe_to(consumer: Consumer, topic: str, **options: Any) -> None:
        consumer.subscribe(topic, max_attempts=1, **options)(lambda message: seen.append(message.topic))

    subscribe_to(with_pattern, f"{unique}.order.*", start="earliest")
    subscribe_to(with_pattern, f"{unique}.order.news", mode="broadcast")
    subscribe_to(other, f"{unique}.invoice")
    with running(other, subscribed=True):
        pass  # it was there once, and is down now
    with TransactionProducer(server.url, group=unique) as producer:
        producer.publish(Message(f"{unique}.invoice", "x"))
        with running(with_pattern, subscribed=True):
            producer.publish(Message(f"{unique}.order.placed", "x"))
            eventually(lambda: f"{unique}.order.placed" in seen, "the message of the pattern")
            eventually(
                lambda: producer.publish(Message(f"{unique}.order.news", "x")) and f"{unique}.order.news" in seen,
                "news",
            )
        assert f"{unique}.invoice" not in seen
        with running(other):
            eventually(lambda: f"{unique}.invoice" in seen, "the message that waited for its service")


def test_a_stuck_consumer_is_in_the_metrics_and_in_the_admin_api(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    subscribe(url, unique, unique)
    publish(url, unique, [str(n) for n in range(8)])
    caller = Caller(url, unique, "sleeper")
    assert len(caller.receive(unique, lease=1)) == 8

    def state() -> str:
        return str(admin(url, "GET", f"groups/{unique}")["instances"][0]["state"])

    assert state() == "ok"
    frozen_server.advance(1)
    assert state() == "stuck"
    assert metric(url, 'notify_consumers{state="stuck"}') >= 1
    Caller(url, unique, "other").receive(unique, max=1, lease=3600)
    (why,) = admin(url, "GET", f"groups/{unique}")["held_back"]
    assert f"sleeper has 0 messages of topic {unique}, and gets more only up to 4" in why
    few = caller.receive(unique)
    assert len(few) == 4  # half of its former bound, since another instance could have the rest
    caller.settle(few)
    assert state() == "ok"
