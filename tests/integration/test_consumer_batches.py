"""Handlers of batches on a queue server: leases of long ones, and how much is taken from a server that may give all."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from notify.client import Consumer, ReceivedMessage
from notify.client.consumer import session
from notify.client.consumer.session import Session
from notify.client.handling.hand import CAUTIOUS
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import Caller, lag, outlast_a_lease, publish, running, subscribe


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
    receive = Session._receive

    async def receive_a_little_longer(session: Session, *asked: Any) -> list[Any]:
        polling = asyncio.ensure_future(receive(session, *asked))
        try:
            return await asyncio.shield(polling)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)  # a server hears late that nobody waits for its answer any more
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            raise

    monkeypatch.setattr(Session, "_receive", receive_a_little_longer)
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
