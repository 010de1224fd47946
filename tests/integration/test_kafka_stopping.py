"""A consumer over Kafka that stops, is cancelled or paused: nothing begins, is written twice or piles up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running

pytest.importorskip("confluent_kafka")

from notify.client.kafka.feed import Feed
from notify.client.kafka.handling import Handling
from notify.client.kafka.window import Window
from notify.kafka import control
from notify.kafka.cluster import Cluster
from notify.kafka.groups import retry_topic
from tests.support.kafka import committed
from tests.support.kafka_consumers import is_assigned, make_topic, produce, progress

pytestmark = pytest.mark.filterwarnings("error")


def test_no_handler_begins_once_the_consumer_is_told_to_stop(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"{n}" for n in range(20)])
    consumer = AsyncConsumer(kafka_url, group=unique)
    seen = []

    @consumer.subscribe(unique, start="earliest")
    async def handle(message: Any) -> None:
        seen.append(message.text)
        consumer.stop()

    asyncio.run(consumer.run())
    assert seen == ["0"]
    assert progress(kafka_url, unique)[unique, 0].offset == 1, "the others come again"


def test_cancelled_within_a_commit_a_consumer_writes_its_retries_once(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"{n}" for n in range(8)])
    committing, cancelling = threading.Event(), threading.Event()

    class Slow:
        """A producer whose first commit returns only after the consumer was cancelled."""

        def __init__(self, producer: Any) -> None:
            self._producer = producer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._producer, name)

        def commit_transaction(self, *given: Any) -> None:
            self._producer.commit_transaction(*given)
            committing.set()
            assert cancelling.wait(PATIENCE_SECONDS)

    make, cancel = Cluster.producer, Handling.cancel

    async def note_and_cancel(self: Handling) -> None:
        cancelling.set()
        await cancel(self)

    monkeypatch.setattr(
        Cluster, "producer", lambda self, own: Slow(make(self, own)) if "transactional.id" in own else make(self, own)
    )
    monkeypatch.setattr(Handling, "cancel", note_and_cancel)
    consumer = AsyncConsumer(kafka_url, group=unique)

    @consumer.subscribe(unique, start="earliest", retry_min=3600.0, retry_max=3600.0)
    async def handle(message: Any) -> None:
        raise RuntimeError("again")

    async def cancelled() -> None:
        running = asyncio.create_task(consumer.run())
        assert await asyncio.to_thread(committing.wait, PATIENCE_SECONDS)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(cancelled())
    left = progress(kafka_url, unique)[unique, 0]
    gone = [offset for offset in range(8) if offset < left.offset or offset in left.done]
    assert len(committed(kafka_url, retry_topic(unique))) == len(gone) > 0


def test_a_paused_group_leaves_its_backlog_where_it_is(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"{n}" for n in range(500)])
    produce(kafka_url, control.TOPIC, [control.Control(paused=True).encoded().decode()], key=unique.encode())
    fetched, polls, many = [], [], threading.Event()
    add, poll = Window.add, Feed.poll

    def noted(self: Window, item: Any) -> bool:
        fetched.append(item)
        return add(self, item)

    async def counted(self: Feed, most: int, seconds: float) -> int:
        polls.append(most)
        if len(polls) == 15:
            many.set()
        return await poll(self, most, seconds)

    consumer = Consumer(kafka_url, group=unique)
    consumer.subscribe(unique, start="earliest")(lambda message: None)
    with running(consumer):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
        monkeypatch.setattr(Window, "add", noted)
        monkeypatch.setattr(Feed, "poll", counted)
        assert many.wait(PATIENCE_SECONDS)
        assert len(fetched) < 10
        produce(kafka_url, control.TOPIC, [control.Control().encoded().decode()], key=unique.encode())
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 500, "everything, once it is resumed")
