"""What producers may send and when consumers get it: rates, backlogs, time to live, delay, priorities, filters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Message, ReceivedMessage, TransactionProducer
from notify.errors import Backpressure, InvalidRequest, NotifyError
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import Caller, bodies, drain, publish, subscribe
from tests.support.http import admin, refusal
from tests.support.shop import Base, Order


@pytest.fixture
def limits(server: ServerProcess) -> Iterator[Any]:
    """Set rate limits; there are none afterwards."""
    yield lambda **limits: admin(server.url, "PUT", "limits", limits)
    admin(server.url, "PUT", "limits", {})


# --- rates ----------------------------------------------------------------------------------------------------


def test_a_producer_over_its_rate_is_told_when_to_come_back(server: ServerProcess, unique: str, limits: Any) -> None:
    limits(topics={unique: 5})
    with TransactionProducer(server.url, group=unique) as producer:
        for _ in range(5):
            producer.publish(Message(unique, "x"))
        with pytest.raises(Backpressure) as refused:
            producer.publish(Message(unique, "x"))
        assert refused.value.code == "rate_limited" and refused.value.retryable
        assert 0 < refused.value.retry_after <= 0.21
        time.sleep(refused.value.retry_after + 0.02)
        producer.publish(Message(unique, "x"))
    limits(producer_groups={unique: 1e6})
    assert admin(server.url, "GET", "limits")["producer_groups"] == {unique: 1e6}


def test_a_refused_half_fails_the_commit_and_nothing_is_sent(
    server: ServerProcess, unique: str, limits: Any, tmp_path: Path
) -> None:
    """Backpressure reaches the code that commits, as an error that says it may be tried again."""
    from notify.client import create_tables, use_explicit_begin

    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    use_explicit_begin(engine)
    create_tables(engine)
    Base.metadata.create_all(engine)
    subscribe(server.url, unique, unique, "shared")
    limits(producer_groups={unique: 1})
    with TransactionProducer(server.url, group=unique, engine=engine) as producer:

        def place(item: str) -> None:
            with Session(engine) as session, session.begin():
                session.add(Order(item=item))
                producer.send(session, Message(unique, item))

        place("first")
        with pytest.raises(Backpressure) as refused:
            place("second")
        time.sleep(refused.value.retry_after + 0.05)
        place("third")
    with Session(engine) as session:
        assert session.scalars(sa.select(Order.item)).all() == ["first", "third"]
    assert [m["body"] for m in drain(server.url, unique, unique, 2)] == ["first", "third"]
    engine.dispose()


def test_the_answer_to_curl_carries_retry_after(server: ServerProcess, unique: str, limits: Any) -> None:
    import json
    import urllib.request

    limits(topics={unique: 1})
    data = json.dumps({"messages": [{"topic": unique, "body": str(n)} for n in range(3)]}).encode()
    request = urllib.request.Request(f"{server.url}/v1/messages", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        items = json.loads(answer.read())["items"]
        assert [i["status"] for i in items] == [201, 429, 429]
        assert items[1]["code"] == "rate_limited" and 0 < items[1]["retry_after"] <= 1
        assert answer.headers["retry-after"] == "1"


def test_a_group_is_given_no_more_than_its_rate(server: ServerProcess, unique: str, limits: Any) -> None:
    subscribe(server.url, unique, unique, "shared")
    publish(server.url, unique, [str(n) for n in range(60)])
    limits(consumer_groups={unique: 20})
    caller = Caller(server.url, unique, "i")
    started = time.monotonic()
    got = 0
    while got < 50:
        got += len(caller.receive(unique, wait=5))
    assert time.monotonic() - started > 1.4  # 20 at once, 30 more at 20/s
    assert refusal(server.url, "PUT", "limits", topics={unique: 0})[0] == 422


# --- backlogs -------------------------------------------------------------------------------------------------


def test_a_full_backlog_refuses_until_the_group_has_caught_up(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared")
    admin(server.url, "PUT", f"topics/{unique}", {"backlog": 10, "backlog_policy": "refuse"})
    with TransactionProducer(server.url, group=unique) as producer:
        for n in range(10):
            producer.publish(Message(unique, str(n)))
        with pytest.raises(Backpressure, match="backlog") as refused:
            producer.publish(Message(unique, "one too many"))
        assert refused.value.code == "backlog_full"
        caller = Caller(server.url, unique, "i")
        assert caller.settle(caller.receive(unique)) == [200] * 10
        time.sleep(0.05)
        producer.publish(Message(unique, "room again"))
    assert refusal(server.url, "PUT", f"topics/{unique}", backlog=10, backlog_policy="nonsense")[0] == 422


def test_hold_makes_the_producer_wait_for_room(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared")
    admin(server.url, "PUT", f"topics/{unique}", {"backlog": 5, "backlog_policy": "hold"})
    publish(server.url, unique, [str(n) for n in range(5)])
    caller = Caller(server.url, unique, "i")
    held = caller.receive(unique)
    threading.Timer(0.5, lambda: caller.settle(held)).start()
    with TransactionProducer(server.url, group=unique) as producer:
        started = time.monotonic()
        producer.publish(Message(unique, "waits"))
        assert 0.4 < time.monotonic() - started < 2
        for n in range(4):
            producer.publish(Message(unique, str(n)))
        with pytest.raises(Backpressure):
            producer.publish(Message(unique, "waits in vain"))
        assert time.monotonic() - started > 2


def test_drop_oldest_lets_go_and_counts(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared")
    admin(server.url, "PUT", f"topics/{unique}", {"backlog": 10, "backlog_policy": "drop_oldest"})
    publish(server.url, unique, [str(n) for n in range(50)])
    eventually(lambda: admin(server.url, "GET", f"topics/{unique}")["queues"][0]["start"] == 40)
    assert bodies(Caller(server.url, unique, "i").receive(unique)) == [str(n) for n in range(40, 50)]


def test_a_backlog_below_what_is_stored_is_refused_and_drops_nothing(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared")
    publish(server.url, unique, [str(n) for n in range(20)])
    for policy in ("refuse", "drop_oldest"):
        found = refusal(server.url, "PUT", f"topics/{unique}", backlog=19, backlog_policy=policy)
        assert found == (422, "backlog_below_stored")
    assert len(Caller(server.url, unique, "i").receive(unique)) == 20


# --- time -----------------------------------------------------------------------------------------------------


def test_expired_messages_are_passed_over(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared")
    with TransactionProducer(server.url, group=unique) as producer:
        producer.publish(Message(unique, "short", ttl=0.2))
        producer.publish(Message(unique, "long", ttl=60))
        producer.publish(Message(unique, "for ever"))
        producer.publish(Message(unique, "delayed, then short", ttl=0.2, delay=0.5))
        with pytest.raises(NotifyError, match="ttl"):
            producer.publish(Message(unique, "none", ttl=0))
    time.sleep(0.9)
    caller = Caller(server.url, unique, "i")
    assert bodies(caller.receive(unique)) == ["long", "for ever"]
    admin(server.url, "PUT", f"topics/{unique}", {"ttl": 1})
    publish(server.url, unique, ["of the topic"])
    time.sleep(1.1)
    assert caller.receive(unique) == []
    queue = admin(server.url, "GET", f"groups/{unique}")["queues"][0]
    assert (queue["position"], queue["settled_above"]) == (1, 2)  # what expired is settled, the two leased ones are not


def test_a_ttl_shorter_than_the_retry_is_refused(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique, "shared", retry_min=5)
    assert refusal(server.url, "PUT", f"topics/{unique}", ttl=4) == (422, "ttl_below_retry")
    admin(server.url, "PUT", f"topics/{unique}", {"ttl": 6})
    path = f"groups/{unique}/subscriptions/{unique}"
    assert refusal(server.url, "PUT", path, retry_min=7) == (422, "ttl_below_retry")
    assert refusal(server.url, "PUT", path, retry_min=5, retry_max=4) == (422, "out_of_bounds")


def test_delay_and_deliver_at_inside_a_transaction_with_keys(
    server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    from notify.client import create_tables, use_explicit_begin

    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    use_explicit_begin(engine)
    create_tables(engine)
    subscribe(server.url, unique, unique, "ordered")
    with TransactionProducer(server.url, group=unique, engine=engine) as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "later", key="k", delay=1.0))
            producer.send(session, Message(unique, "now", key="k"))
            at = datetime.now(UTC) + timedelta(seconds=0.5)
            producer.send(session, Message(unique, "at", key="k", deliver_at=at))
            producer.send(session, Message(unique, "in 40 days", key="k", delay=40 * 86_400))
        sent = time.time()
    caller = Caller(server.url, unique, "i")
    for body, due in (("now", 0.0), ("at", 0.5), ("later", 1.0)):
        found = caller.receive(unique, wait=5)
        assert bodies(found) == [body]
        assert due - 0.1 < time.time() - sent < due + 0.4
        caller.settle(found)
    engine.dispose()


def test_a_retry_keeps_its_time_over_a_restart(unique: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, unique, unique, "shared")
        publish(server.url, unique, ["a", "b"])
        caller = Caller(server.url, unique, "i")
        first = caller.receive(unique)
        caller.settle(first[:1], "retry", delay=3)
        caller.settle(first[1:], "retry", delay=0)
        settled = time.monotonic()
        server.kill()
        server.start()
        caller = Caller(server.url, unique, "i")
        again = caller.receive(unique, wait=1)
        assert bodies(again) == ["b"] and again[0]["attempt"] == 2
        again = caller.receive(unique, wait=10)
        assert bodies(again) == ["a"] and again[0]["attempt"] == 2
        assert time.monotonic() - settled > 2.9
    finally:
        server.stop()


# --- who gets what --------------------------------------------------------------------------------------------


def test_filters_by_header_and_tag(server: ServerProcess, unique: str) -> None:
    got: list[tuple[str, str]] = []
    consumers = []
    with TransactionProducer(server.url, group=unique) as producer:
        for name, options in (
            ("eu", {"filter": 'has(headers.region) && headers.region == "eu"'}),
            ("big", {"filter": 'int(headers["n"]) >= 3', "tags": ["vip"]}),
        ):
            consumer = Consumer(server.url, group=f"{unique}-{name}")

            @consumer.subscribe(unique, start="earliest", **options)  # type: ignore[arg-type]
            def on_message(message: ReceivedMessage, name: str = name) -> None:
                got.append((name, message.text))

            thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
            thread.start()
            consumers.append((consumer, thread))
        for n in range(6):
            headers = {"region": "eu" if n % 2 else "us", "n": str(n)}
            producer.publish(Message(unique, str(n), headers=headers, tag="vip" if n != 4 else None))
        producer.publish(Message(unique, "no headers", tag="vip"))
        eventually(lambda: len(got) >= 5)
    time.sleep(0.2)
    for consumer, thread in consumers:
        consumer.stop()
        thread.join(10)
    assert sorted(got) == [("big", "3"), ("big", "5"), ("eu", "1"), ("eu", "3"), ("eu", "5")]
    assert admin(server.url, "GET", f"groups/{unique}-eu")["queues"][0]["lag"] == 0


@pytest.mark.parametrize("text", ["headers.region ==", "nope == 1", "1 + 1", "x" * 1001, '"text"'])
def test_a_filter_that_cannot_be_is_refused(server: ServerProcess, unique: str, text: str) -> None:
    path = f"groups/{unique}/subscriptions/{unique}"
    assert refusal(server.url, "PUT", path, filter=text) == (422, "invalid_filter")


def test_a_filter_passes_over_a_large_backlog(server: ServerProcess, unique: str) -> None:
    """One that matches lies behind 60,000 that do not: more than is looked at in one go."""
    admin(server.url, "PUT", f"groups/{unique}/subscriptions/{unique}", {"tags": ["rare"], "start": "latest"})
    filtered = f"{unique}-cel"
    admin(server.url, "PUT", f"groups/{filtered}/subscriptions/{unique}", {"filter": 'tag == "rare"'})
    for _ in range(15):
        publish(server.url, unique, ["x"] * 4000)
    with TransactionProducer(server.url, group=unique) as producer:
        producer.publish(Message(unique, "found", tag="rare"))
    for group in (unique, filtered):
        assert bodies(Caller(server.url, group, "i").receive(unique, wait=20)) == ["found"]


def test_priorities_are_changed_while_consumers_run(server: ServerProcess, unique: str) -> None:
    group = unique
    for kind in ("high", "low"):
        subscribe(server.url, group, f"{unique}-{kind}", "shared")
    classes = [{"name": "high", "topics": ["*-high"]}, {"name": "normal"}, {"name": "low", "topics": ["*-low"]}]
    answer = admin(server.url, "PUT", f"groups/{group}/priorities", {"classes": classes})
    assert [c["weight"] for c in answer["result"]["classes"]] == [6, 3, 1]
    for kind in ("high", "low"):
        publish(server.url, f"{unique}-{kind}", ["x"] * 3000)

    def share(of: int) -> float:
        found: list[str] = []
        caller = Caller(server.url, group, "i")
        caller_topics = [f"{unique}-high", f"{unique}-low"]
        while len(found) < of:
            request = {"instance": "i", "topics": caller_topics, "max": 70, "wait": 0, "lease": 30}
            messages = caller._call(f"/v1/groups/{group}/receive", request)["messages"]
            caller.settle(messages)
            found += [m["topic"] for m in messages]
        return found.count(f"{unique}-high") / len(found)

    assert abs(share(1400) - 6 / 7) < 0.05
    classes = [{"name": "high", "topics": ["*-high"], "weight": 1}, {"name": "low", "topics": ["*-low"], "weight": 1}]
    admin(server.url, "PUT", f"groups/{group}/priorities", {"classes": classes})
    assert abs(share(1400) - 0.5) < 0.05
    path = f"groups/{group}/priorities"
    assert refusal(server.url, "PUT", path, classes=[{"name": "a", "weight": 0}])[0] == 422
    assert refusal(server.url, "PUT", path, classes=[]) == (422, "invalid_schema")
    assert refusal(server.url, "PUT", path, classes=[{"name": "a"}, {"name": "a"}]) == (422, "invalid_priorities")
    assert refusal(server.url, "PUT", path, classes=[{"name": str(n)} for n in range(4)]) == (422, "invalid_priorities")


def test_topics_made_on_the_fly_are_consumed_by_a_pattern(server: ServerProcess, unique: str) -> None:
    got: list[str] = []
    consumer = Consumer(server.url, group=unique)

    @consumer.subscribe(f"{unique}.*")
    def on_task(message: ReceivedMessage) -> None:
        got.append(message.topic)

    # What the consumer does itself as it starts: here it must be there before the first topic is made.
    admin(server.url, "PUT", f"groups/{unique}/subscriptions/{unique}.*", {})
    thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
    thread.start()
    with TransactionProducer(server.url, group=unique) as producer:
        for n in range(20):
            producer.publish(Message(f"{unique}.{n}", "x"))
        eventually(lambda: len(got) == 20)
    consumer.stop()
    thread.join(10)
    assert sorted(got) == sorted(f"{unique}.{n}" for n in range(20))
    admin(server.url, "DELETE", f"groups/{unique}/subscriptions/{unique}.*", {})
    with pytest.raises(InvalidRequest, match="pattern"):
        consumer.subscribe("x*", mode="broadcast")


def test_a_stuck_consumer_is_in_the_metrics_and_in_the_admin_api(server: ServerProcess, unique: str) -> None:
    import urllib.request

    subscribe(server.url, unique, unique, "shared")
    publish(server.url, unique, [str(n) for n in range(8)])
    caller = Caller(server.url, unique, "sleeper")
    assert len(caller.receive(unique, lease=1)) == 8

    def state() -> str:
        return str(admin(server.url, "GET", f"groups/{unique}")["instances"][0]["state"])

    eventually(lambda: state() == "stuck")
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    stuck = next(line for line in text.splitlines() if line.startswith('notify_consumers{state="stuck"}'))
    assert int(stuck.split()[1]) >= 1
    few = caller.receive(unique)
    assert len(few) == 4  # half of what it had
    caller.settle(few)
    assert state() == "ok"
