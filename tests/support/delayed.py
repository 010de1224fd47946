"""Delayed messages as a bridge sends them to Kafka, and producers that are interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from notify.kafka.cluster import Cluster
from notify.kafka.records import DUE, ID, REASON, TARGET
from notify.kafka.undelivered import TOPIC
from notify.movers.sinks.delays.topics import make_wheels
from notify.movers.sinks.delays.wheels import WHEELS
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.clock import PATIENCE_SECONDS
from tests.support.kafka import committed, patient_sink


def texts_of(url: str, topic: str, wanted: int = 0) -> list[str]:
    """The values of all committed records of a topic. Fails if fewer come than `wanted`."""
    return [record.value().decode() for record in committed(url, topic, wanted)]


def send_delayed(url: str, topic: str, bodies: Sequence[str], delay: float) -> None:
    """Send messages as a bridge does, in one batch; the last letter of each is its key. `delay` is in seconds."""
    _send(url, topic, [PackedMessage(topic=topic, body=body.encode(), key=body[-1], delay=delay) for body in bodies])


def send_at(url: str, topic: str, body: str, due_us: int) -> None:
    """Send a message as a bridge does that is due then, in microseconds since 1970."""
    due = datetime.fromtimestamp(due_us / 1e6, UTC)
    _send(url, topic, [PackedMessage(topic=topic, body=body.encode(), key="k", deliver_at=due)], source=body)


def _send(url: str, topic: str, messages: Sequence[PackedMessage], source: str = "") -> None:
    source = topic + source.replace(" ", "-")

    async def run() -> None:
        sink = patient_sink(url)
        try:
            epoch, before = await sink.claim(source)
            transactions = [BridgedTransaction(ids.to_text(ids.new_id()), "g", [message]) for message in messages]
            position = messages[-1].body.decode() if messages[-1].body else ""
            await sink.append(
                source,
                PackedBridgeBatch(epoch=epoch, expected_position=before, position=position, transactions=transactions),
            )
        finally:
            await sink.close()

    asyncio.run(run())


def refuse(url: str, *messages: tuple[str, str]) -> None:
    """Put messages (id and topic) on the list of refused ones, as a releaser does."""
    cluster = Cluster.of(url)
    make_wheels(cluster, WHEELS)
    producer = cluster.producer({})
    for name, topic in messages:
        headers = [(ID, name), ("colour", "red"), (DUE, "1"), (TARGET, topic), (REASON, "Message size too large")]
        producer.produce(TOPIC, name.encode(), b"k", partition=0, headers=[(n, v.encode()) for n, v in headers])
    assert producer.flush(PATIENCE_SECONDS) == 0


class Interrupted:
    """A producer that does something before its first call of a method."""

    def __init__(self, producer: Any, method: str, interrupt: Callable[[], None], after: int = 0) -> None:
        """`after`: so many calls go through before."""
        self._producer = producer
        self._method = method
        self._interrupt = interrupt
        self._after = after

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._after -= 1
            if self._after == -1:
                self._interrupt()
        return getattr(self._producer, name)


def interrupt_producers(method: str, interrupt: Callable[[], None], after: int = 0) -> Callable[[], None]:
    """Have each producer that is made from now on in this process be `Interrupted`; the function that ends this."""
    make = Cluster.producer

    def made(self: Cluster, own: Any) -> Any:
        return Interrupted(make(self, own), method, interrupt, after)

    Cluster.producer = made  # type: ignore[method-assign]

    def end() -> None:
        Cluster.producer = make  # type: ignore[method-assign]

    return end


def signal_self(number: int) -> Callable[[], None]:
    """A function that sends this process a signal."""
    return lambda: os.kill(os.getpid(), signal.Signals(number))
