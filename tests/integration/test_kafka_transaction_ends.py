"""A transaction whose end is answered at once, late or twice, and what its producer may do after it.

tests/integration/test_kafka_late_requests.py has the matrix of what may be late, for all that writes to Kafka.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from notify.errors import Conflict, Unavailable
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.kafka import KafkaNode, committed
from tests.support.kafka_proxy import Api, Fault, Planned, Which

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException

from notify.kafka.cluster import Cluster
from notify.kafka.positions import Recorded
from notify.kafka.transactional import TransactionalProducer
from notify.movers.sinks.kafka import KafkaSink
from tests.support.delayed import texts_of
from tests.support.kafka_consumers import make_topic

ASKED_AGAIN = {"socket.timeout.ms": 500}
"""The client breaks a connection whose answer takes longer, and asks again."""
IN_ONE_CONNECTION = {**ASKED_AGAIN, "socket.max.fails": 0}
"""The client asks again in the connection whose answer takes longer."""
DYING = """
import sys
from notify.kafka.cluster import Cluster
url, name, end = sys.argv[1:]
producer = Cluster.of(url).transactional_producer({"transactional.id": name})
producer.init_transactions(60)
producer.begin_transaction()
producer.produce(name, b"of-the-dead", partition=0)
producer.flush(60)
getattr(producer, end)(60)
"""


def begun(node: KafkaNode, name: str, text: str, **own: Any) -> TransactionalProducer:
    """A producer with an open transaction that has one record."""
    producer = Cluster.of(node.url).transactional_producer({"transactional.id": name, **own})
    producer.init_transactions(PATIENCE_SECONDS)
    writes(producer, name, text)
    return producer


def writes(producer: TransactionalProducer, topic: str, text: str) -> None:
    producer.begin_transaction()
    producer.produce(topic, text.encode(), partition=0)
    assert not producer.flush(PATIENCE_SECONDS)


def ends(node: KafkaNode, name: str, fault: Fault, end: str, **own: Any) -> tuple[TransactionalProducer, Planned]:
    """A producer that was told that a transaction has ended, and what happened to the request."""
    producer = begun(node, name, "first", **own)
    which, until = Which(Api.END_TXN, name.encode()), ()
    if fault is Fault.HELD:
        # The client looks for its coordinator when it sends the request, and again when the answer is overdue.
        until = (Which(Api.FIND_COORDINATOR, name.encode(), nth=2),)
    planned = node.proxy.plan(which, fault, until if fault in (Fault.LATE, Fault.HELD) else None)
    getattr(producer, end)(PATIENCE_SECONDS)
    assert planned.has_hit
    return producer, planned


@pytest.mark.long
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_producer_goes_on_if_all_was_answered(kafka_url: str, unique: str, end: str) -> None:
    make_topic(kafka_url, unique)
    producer = Cluster.of(kafka_url).transactional_producer({"transactional.id": unique})
    producer.init_transactions(PATIENCE_SECONDS)
    for texts in (["a"], [], ["b", "c"]):
        producer.begin_transaction()
        for text in texts:
            producer.produce(unique, text.encode())
        assert not producer.flush(PATIENCE_SECONDS)
        getattr(producer, end)(PATIENCE_SECONDS)
        assert not producer.is_spent
    assert sorted(texts_of(kafka_url, unique)) == (["a", "b", "c"] if end == "commit_transaction" else [])


@pytest.mark.long
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
@pytest.mark.parametrize(
    ("fault", "own"),
    [
        (Fault.LATE, {}),
        (Fault.CUT_BEFORE, {}),
        pytest.param(Fault.CUT_AFTER, {}, marks=pytest.mark.long),
        (Fault.HELD, IN_ONE_CONNECTION),
        pytest.param(Fault.HELD, ASKED_AGAIN, marks=pytest.mark.long),
    ],
)
def test_a_producer_whose_end_was_asked_for_twice_begins_nothing_else(
    kafka_node: KafkaNode, unique: str, fault: Fault, own: dict[str, Any], end: str
) -> None:
    """Kafka's client says that all is well."""
    make_topic(kafka_node.url, unique)
    producer, planned = ends(kafka_node, unique, fault, end, **own)
    assert producer.is_spent
    with pytest.raises(KafkaException, match="a new one is made"):
        producer.begin_transaction()
    successor = begun(kafka_node, unique, "second")
    planned.release()
    eventually(lambda: planned.is_over, "the broker to answer what was late")
    wanted = ["first"] if end == "commit_transaction" else []
    assert texts_of(kafka_node.url, unique) == wanted
    successor.produce(unique, b"third", partition=0)
    successor.commit_transaction(PATIENCE_SECONDS)
    assert not successor.is_spent
    assert texts_of(kafka_node.url, unique) == [*wanted, "second", "third"]


@pytest.mark.long
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_the_end_of_a_process_that_died_ends_nothing_of_its_successor(
    kafka_node: KafkaNode, unique: str, end: str
) -> None:
    """Its successor's claim has given the transactional id another epoch, and brokers refuse the earlier one."""
    make_topic(kafka_node.url, unique)
    planned = kafka_node.proxy.plan(Which(Api.END_TXN, unique.encode()), Fault.LATE, ())
    process = subprocess.Popen([sys.executable, "-c", DYING, kafka_node.url, unique, end])
    try:
        eventually(lambda: planned.has_hit, "the process to end its transaction")
    finally:
        process.kill()
        process.wait()
    successor = begun(kafka_node, unique, "second")
    planned.release()
    eventually(lambda: planned.is_over, "the broker to answer what was late")
    assert committed(kafka_node.url, unique) == []
    successor.produce(unique, b"third", partition=0)
    successor.commit_transaction(PATIENCE_SECONDS)
    assert texts_of(kafka_node.url, unique) == ["second", "third"]


def test_a_client_that_logs_no_requests_is_replaced_each_time(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So another version of the client cannot make a producer seem to be safe."""
    monkeypatch.setattr("notify.kafka.exchange.Exchange._note", lambda *_: None)
    make_topic(kafka_url, unique)
    producer = Cluster.of(kafka_url).transactional_producer({"transactional.id": unique})
    with caplog.at_level(logging.ERROR, "notify.kafka"):
        producer.init_transactions(PATIENCE_SECONDS)
    assert "does not log its requests" in caplog.text
    writes(producer, unique, "first")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert producer.is_spent


def batch(epoch: int, topic: str, text: str, position: str) -> PackedBridgeBatch:
    message = PackedMessage(topic=topic, body=text.encode())
    transaction = BridgedTransaction(ids.to_text(ids.new_id()), "g", [message])
    return PackedBridgeBatch(epoch, "", position, transactions=[transaction])


class Sinks:
    """Sinks of one source, which is named like its topic."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self.name = url, name
        self.open: list[KafkaSink] = []

    async def claimed(self) -> tuple[KafkaSink, int]:
        """Another sink that claims the source, and its epoch."""
        sink = KafkaSink(self._url, PATIENCE_SECONDS)
        self.open.append(sink)
        return sink, (await sink.claim(self.name))[0]

    def fence(self) -> None:
        """Let a claim that has failed arrive late: nobody uses the client, and it records nothing."""
        late = Cluster.of(self._url).transactional_producer({"transactional.id": f"notify-bridge-{self.name}"})
        late.init_transactions(PATIENCE_SECONDS)

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            try:
                await test
            finally:
                for sink in self.open:
                    await sink.close()

        asyncio.run(whole())


def spend(sink: KafkaSink) -> None:
    assert sink._producer is not None
    sink._producer.is_spent = True


@pytest.mark.long
def test_a_sink_goes_on_with_another_client(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    sinks = Sinks(kafka_url, unique)

    async def run() -> None:
        sink, epoch = await sinks.claimed()
        for n in range(3):
            client = sink._producer
            await sink.append(unique, batch(epoch, unique, str(n), str(n)))
            spend(sink)
            assert (client is sink._producer) is (n == 0)
        assert await sink.position(unique) == "2"

    sinks.run(run())
    assert sorted(texts_of(kafka_url, unique)) == ["0", "1", "2"]


@pytest.mark.long
def test_a_sink_takes_no_other_client_if_another_bridge_came(kafka_url: str, unique: str) -> None:
    """It would fence that bridge, and publish what that one has published."""
    make_topic(kafka_url, unique)
    sinks = Sinks(kafka_url, unique)

    async def run() -> None:
        sink, epoch = await sinks.claimed()
        await sink.append(unique, batch(epoch, unique, "first", "1"))
        spend(sink)
        other, later = await sinks.claimed()
        with pytest.raises(Conflict, match="stop one of the two"):
            await sink.append(unique, batch(epoch, unique, "again", "2"))
        await other.append(unique, batch(later, unique, "second", "2"))

    sinks.run(run())
    assert sorted(texts_of(kafka_url, unique)) == ["first", "second"]


@pytest.mark.long
def test_a_late_claim_of_its_own_does_not_end_a_bridge(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request of a claim that timed out arrived after that of the next claim, which failed for good."""
    make_topic(kafka_url, unique)
    sinks = Sinks(kafka_url, unique)
    read = Recorded.read

    def then_fenced(self: Recorded, *given: Any) -> int:
        monkeypatch.undo()
        epoch = read(self, *given)
        sinks.fence()
        return epoch

    async def run() -> None:
        monkeypatch.setattr(Recorded, "read", then_fenced)
        with pytest.raises(Unavailable, match="arrived late"):
            await sinks.claimed()
        sink = sinks.open[0]
        epoch, _ = await sink.claim(unique, take_back=False)
        sinks.fence()
        with pytest.raises(Unavailable, match="arrived late"):
            await sink.append(unique, batch(epoch, unique, "first", "1"))
        epoch, position = await sink.claim(unique, take_back=False)
        assert position == ""
        await sink.append(unique, batch(epoch, unique, "first", "1"))

    sinks.run(run())
    assert texts_of(kafka_url, unique) == ["first"]


@pytest.mark.long
def test_a_position_is_not_committed_without_what_came_before_it(kafka_node: KafkaNode, unique: str) -> None:
    """A copy of an abort that the client has not sent itself: nothing tells it, and the brokers refuse the position."""
    make_topic(kafka_node.url, unique)
    sinks = Sinks(kafka_node.url, unique)
    about = f"notify-bridge-{unique}".encode()

    async def run() -> None:
        sink, epoch = await sinks.claimed()
        part = msgspec.structs.replace(batch(epoch, unique, "taken back", ""), prepare=True)
        await sink.append(unique, part)
        copied = kafka_node.proxy.plan(Which(Api.END_TXN, about, commit=False), Fault.REPEATED, ())
        rolled_back = msgspec.structs.replace(
            batch(epoch, unique, "", "1"), transactions=[], rollback=[part.transactions[0].id]
        )
        await sink.append(unique, rolled_back)
        whole = batch(epoch, unique, "first", "2")
        await sink.append(unique, msgspec.structs.replace(whole, prepare=True))
        await asyncio.to_thread(
            eventually, lambda: len(committed(kafka_node.url, unique, uncommitted=True)) == 2, "the part to be sent"
        )
        copied.release()
        await asyncio.to_thread(eventually, lambda: copied.is_over, "the broker to answer the copy")
        end = msgspec.structs.replace(whole, transactions=[], commit=[whole.transactions[0].id])
        with pytest.raises(Unavailable):
            await sink.append(unique, end)
        epoch, position = await sink.claim(unique, take_back=False)
        assert position == "1"
        await sink.append(unique, batch(epoch, unique, "first", "2"))

    sinks.run(run())
    assert texts_of(kafka_node.url, unique) == ["first"]
