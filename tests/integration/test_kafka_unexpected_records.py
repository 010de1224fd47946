"""Records, orders and cancellations that nobody expects: none of them ends or stops a consumer over Kafka."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from notify.client import Consumer
from notify.errors import Conflict
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running

pytest.importorskip("confluent_kafka")

from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from notify.client.kafka import loop, modes
from notify.kafka import control
from notify.kafka.cluster import Cluster
from notify.kafka.control import Control
from notify.kafka.groups import owner_topic
from tests.support.kafka_consumers import CALL_SECONDS, admin_of, is_assigned, make_topic, produce, progress

pytestmark = pytest.mark.filterwarnings("error")
YEAR_55840 = 1_700_000_000_000_000
"""Microseconds since 1970, where Kafka wants milliseconds."""


def accept_any_time(url: str, topic: str) -> None:
    """As brokers before Kafka 4 do."""
    entry = ConfigEntry(
        "message.timestamp.after.max.ms", str((1 << 63) - 1), incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for changed in admin_of(url).incremental_alter_configs([resource]).values():
        changed.result(CALL_SECONDS)


def is_done(url: str, topic: str, count: int) -> bool:
    at = progress(url, topic).get((topic, 0))
    return at is not None and at.offset == count


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", "ordered"])
def test_a_time_that_no_calendar_has_stops_nobody(kafka_url: str, unique: str, mode: Any) -> None:
    make_topic(kafka_url, unique)
    accept_any_time(kafka_url, unique)
    produce(kafka_url, unique, ["before"])
    produce(kafka_url, unique, ["strange"], timestamp=YEAR_55840)
    produce(kafka_url, unique, ["after"])
    seen: dict[str, str] = {}
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(unique, start="earliest", mode=mode)
    def handle(message: Any) -> None:
        seen[message.text] = message.committed_at

    with running(consumer):
        eventually(lambda: is_done(kafka_url, unique, 3), "all three to be done")
    assert seen.keys() == {"before", "strange", "after"}
    assert seen["strange"].startswith("9999-12-31T23:59:59")


@pytest.mark.long
def test_many_orders_of_operators_hold_up_no_start(kafka_url: str, unique: str) -> None:
    """Kafka compacts the topic of orders late: each order of a week may still be there."""
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a"])
    consumer = Consumer(kafka_url, group=unique)
    arrived = threading.Event()

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        arrived.set()

    with running(consumer):  # it makes the topic of orders
        assert arrived.wait(PATIENCE_SECONDS)
    producer = Cluster.of(kafka_url).producer({})
    for number in range(200):
        producer.produce(
            control.TOPIC, Control(paused=number % 2 == 0).encoded(), key=f"{unique}-{number % 7}".encode()
        )
    assert producer.flush(CALL_SECONDS) == 0
    arrived.clear()
    produce(kafka_url, unique, ["b"])
    again = Consumer(kafka_url, group=unique)
    again.subscribe(unique)(handle)
    with running(again):
        assert arrived.wait(PATIENCE_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("shared", "exclusive"), ("failover", "ordered")])
def test_a_group_does_not_mix_an_owner_and_members(
    kafka_url: str, unique: str, first: Any, second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two handled every message: Kafka takes an owner's transactions beside the members' commits."""
    monkeypatch.setattr(modes, "PASSING_SECONDS", 0.1)
    make_topic(kafka_url, unique)
    group = owner_topic(unique) if first == "failover" else unique
    standing, other = Consumer(kafka_url, group=unique), Consumer(kafka_url, group=unique)
    standing.subscribe(unique, mode=first)(lambda message: None)
    other.subscribe(unique, mode=second)(lambda message: None)
    with running(standing):
        eventually(lambda: is_assigned(kafka_url, group), "the first consumer")
        with pytest.raises(Conflict) as raised:
            other.run(signals=False)
    assert raised.value.code == "mode_in_use"
    last = Consumer(kafka_url, group=unique)
    arrived = threading.Event()
    last.subscribe(unique, mode=second, start="earliest")(lambda message: arrived.set())
    with running(last):  # nobody of the other mode is there any more
        produce(kafka_url, unique, ["a"])
        assert arrived.wait(PATIENCE_SECONDS)


@pytest.mark.long
def test_a_second_consumer_with_the_name_of_an_instance_is_refused(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two got the messages of some partitions, and missed the others."""
    monkeypatch.setattr(modes, "PASSING_SECONDS", 0.1)
    make_topic(kafka_url, unique, 2)
    first, second = (Consumer(kafka_url, group=unique, instance="web") for _ in range(2))
    seen: list[str] = []
    first.subscribe(unique, mode="broadcast", start="earliest")(lambda message: seen.append(message.text))
    second.subscribe(unique, mode="broadcast")(lambda message: None)
    with running(first):
        eventually(lambda: is_assigned(kafka_url, f"{unique}@web"), "the first consumer")
        with pytest.raises(Conflict) as raised:
            second.run(signals=False)
        assert raised.value.code == "topic_is_taken" and "'web'" in str(raised.value)
        produce(kafka_url, unique, [*"abcdef"])
        eventually(lambda: sorted(seen) == [*"abcdef"], "all messages")
    with running(second):  # the first one has left
        eventually(lambda: is_assigned(kafka_url, f"{unique}@web"), "the second consumer")


@pytest.mark.long
def test_of_two_consumers_with_the_name_of_an_instance_that_start_together_one_ends(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither found the other, and each got the messages of some partitions as long as both ran."""
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    make_topic(kafka_url, unique, 2)
    together = threading.Barrier(2)
    refuse = modes.OtherModes.refuse

    async def at_the_same_time(self: modes.OtherModes) -> None:
        await refuse(self)
        await asyncio.to_thread(together.wait, PATIENCE_SECONDS)

    monkeypatch.setattr(modes.OtherModes, "refuse", at_the_same_time)
    seen: tuple[list[str], list[str]] = [], []
    ended: dict[int, Conflict] = {}
    consumers = [Consumer(kafka_url, group=unique, instance="web") for _ in seen]

    def run(number: int) -> None:
        try:
            consumers[number].run(signals=False)
        except Conflict as error:
            ended[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in (0, 1)]
    for consumer, texts, thread in zip(consumers, seen, threads, strict=True):
        consumer.subscribe(unique, mode="broadcast")(lambda message, texts=texts: texts.append(message.text))
        thread.start()
    try:
        eventually(lambda: ended, "one of them to end")
        (error,) = ended.values()
        assert error.code == "topic_is_taken" and "'web'" in str(error)
        other = 1 - next(iter(ended))
        eventually(lambda: is_assigned(kafka_url, f"{unique}@web"), "the other to be alone")
        produce(kafka_url, unique, [*"abcdef"])
        eventually(lambda: sorted(seen[other]) == [*"abcdef"], "all messages")
    finally:
        for consumer in consumers:
            consumer.stop()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert len(ended) == 1
