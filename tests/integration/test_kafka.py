"""Apache Kafka as the queue: bridge and relay publish exactly once, the SDK's consumer keeps its promises."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Superseded
from notify.client import Consumer, DeadLetter, Inbox, Message, TransactionProducer, create_tables
from notify.kafka.cluster import Cluster
from notify.kafka.groups import dead_letter_topic
from notify.kafka.records import header, listed
from notify.movers.relay.relay import Relay
from notify.movers.relay.rows import Rows
from notify.movers.sinks.delays.releaser import Releaser
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.databases import empty_database
from tests.support.groups import running
from tests.support.kafka import committed
from tests.support.shop import Base, Order, make_engine

pytest.importorskip("confluent_kafka")


class Killed(Exception):
    """Stands for the death of a process."""


@contextmanager
def releasing(url: str) -> Iterator[None]:
    """A release of delayed messages in a thread, stopped afterwards."""
    release = Releaser(Cluster.of(url))
    thread = threading.Thread(target=release.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        release.stop()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the release did not stop"


@contextmanager
def outbox(
    kind: str, database_urls: Mapping[str, str], topic: str, directory: Path
) -> Iterator[tuple[str, sa.Engine, TransactionProducer]]:
    """An empty database with the tables of a shop: its URL, its engine, and a producer that writes its outbox only."""
    with empty_database(kind, database_urls, directory) as url:
        engine = make_engine(url)
        create_tables(engine)
        Base.metadata.create_all(engine)
        with TransactionProducer("http://127.0.0.1:9", group=topic, engine=engine, mode="outbox") as producer:
            yield url, engine, producer
        engine.dispose()


def order(producer: TransactionProducer, engine: sa.Engine, topic: str, n: int, **options: Any) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(item=str(n)))
        producer.send(session, Message(topic, {"n": n}, key=f"k{n % 5}", tag="t", headers={"h": "v"}, **options))


def test_a_bridge_publishes_exactly_once_over_restarts(
    kafka_url: str, database_urls: dict[str, str], unique: str, tmp_path: Path
) -> None:
    with outbox("mariadb", database_urls, unique, tmp_path) as (url, engine, producer):

        async def run() -> None:
            for n in range(120):
                await asyncio.to_thread(order, producer, engine, unique, n)
                if n % 40 == 39:
                    # Each time another bridge, as after a crash: it continues from the position that Kafka has.
                    bridge = Bridge([url], kafka_url)
                    await bridge.run(once=True)
                    assert bridge.totals.rows == 40

        asyncio.run(run())
    records = committed(kafka_url, unique, wanted=120)
    assert sorted(json.loads(m.value())["n"] for m in records) == list(range(120))
    by_key: dict[bytes, list[int]] = {}
    for m in records:
        by_key.setdefault(m.key(), []).append(json.loads(m.value())["n"])
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    headers = listed(records[0])
    assert header(headers, "notify-tag") == "t" and header(headers, "h") == "v"
    assert header(headers, "notify-group") == unique and (header(headers, "notify-id") or "").endswith(".0")


@pytest.mark.long
def test_a_second_bridge_fences_the_first(
    kafka_url: str, database_urls: dict[str, str], unique: str, tmp_path: Path
) -> None:
    with outbox("mariadb", database_urls, unique, tmp_path) as (url, engine, producer):

        async def run() -> None:
            first = Bridge([url], kafka_url)
            task = asyncio.ensure_future(first.run())
            order(producer, engine, unique, 0)
            await eventually_async(lambda: first.totals.rows, "the first bridge to move a row")
            # Both read with the same server id: the source cuts off the first, which then has no row to be refused.
            second = Bridge([url], kafka_url)
            other = asyncio.ensure_future(second.run())
            with pytest.raises(Superseded):
                await asyncio.wait_for(task, PATIENCE_SECONDS)
            order(producer, engine, unique, 1)
            await eventually_async(lambda: second.totals.rows, "the second bridge to move a row")
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

        asyncio.run(run())
    assert sorted(json.loads(m.value())["n"] for m in committed(kafka_url, unique, wanted=2)) == [0, 1]


@pytest.mark.long
def test_a_relay_marks_what_was_published_before_it_died(
    kafka_url: str,
    database_urls: dict[str, str],
    unique: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with outbox("postgresql", database_urls, unique, tmp_path) as (_, engine, producer):
        for n in range(30):
            order(producer, engine, unique, n)
        relay = Relay(engine, kafka_url)

        def dies(*_: object) -> None:
            raise Killed

        with monkeypatch.context() as planted:
            planted.setattr(Rows, "note", dies)
            with pytest.raises(Killed):
                asyncio.run(relay.run(once=True))
        again = Relay(engine, kafka_url)
        asyncio.run(again.run(once=True))
        assert again.total.sent == 0
    assert Counter(json.loads(m.value())["n"] for m in committed(kafka_url, unique, wanted=30)) == Counter(range(30))


@pytest.mark.long
def test_handlers_inbox_retries_and_dead_letters(
    kafka_url: str, database_urls: dict[str, str], unique: str, tmp_path: Path
) -> None:
    with outbox("postgresql", database_urls, unique, tmp_path) as (_, engine, producer):
        consumer = Consumer(kafka_url, group=unique, inbox=Inbox(engine))
        attempts: Counter[int] = Counter()

        @consumer.subscribe(unique, start="earliest", max_attempts=3, tags=["t"])
        def on_order(message: Any, session: Session) -> None:
            n = message.json()["n"]
            attempts[n] += 1
            session.add(Order(item=f"handled {n}"))
            if n == 3 and message.attempt < 3:
                raise RuntimeError("again")
            if n == 4:
                raise DeadLetter("never")
            if n == 5:
                raise RuntimeError("never works")

        with running(consumer):
            for n in range(10):
                order(producer, engine, unique, n)
            asyncio.run(Relay(engine, kafka_url).run(once=True))

            def handled() -> bool:
                with Session(engine) as session:
                    items = session.scalars(sa.select(Order.item).where(Order.item.like("handled%"))).all()
                return sorted(items) == sorted(f"handled {n}" for n in (0, 1, 2, 3, 6, 7, 8, 9))

            eventually(handled, "each order but the two that fail to have its effect")
            eventually(lambda: attempts[5] == 3, "the third attempt of the order that always fails")
    assert (attempts[3], attempts[4], attempts[5], attempts[0]) == (3, 1, 3, 1)
    dead = committed(kafka_url, dead_letter_topic(unique), wanted=2)
    assert sorted(json.loads(m.value())["n"] for m in dead) == [4, 5]
    assert "never" in (header(listed(dead[0]), "notify-reason") or "")


@pytest.mark.long
def test_delayed_messages_are_held_before_release(
    kafka_url: str, database_urls: dict[str, str], unique: str, tmp_path: Path
) -> None:
    """None comes early, and none twice after a restart: a later message proves that the earlier were read again."""
    with outbox("postgresql", database_urls, unique, tmp_path) as (_, engine, producer):
        sent = time.time()
        for n, delay in enumerate((2.0, 1.0, None)):
            order(producer, engine, unique, n, **({} if delay is None else {"delay": delay}))
        asyncio.run(Relay(engine, kafka_url).run(once=True))
        with releasing(kafka_url):
            committed(kafka_url, unique, wanted=3)
        order(producer, engine, unique, 3, delay=1.0)
        asyncio.run(Relay(engine, kafka_url).run(once=True))
        with releasing(kafka_url):
            records = committed(kafka_url, unique, wanted=4)
    assert sorted(json.loads(m.value())["n"] for m in records) == [0, 1, 2, 3]
    visible = {json.loads(m.value())["n"]: m.timestamp()[1] / 1000 - sent for m in records}
    assert visible[0] >= 2.0 and visible[1] >= 1.0
