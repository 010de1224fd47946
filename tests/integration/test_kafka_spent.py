"""A transaction whose end is answered at once, late or twice, and what its producer may do after it.

tests/integration/test_kafka_late.py has the matrix of what may be late, for all that writes to Kafka.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.kafka import KafkaNode, committed
from tests.support.kafka_proxy import Api, Fault, Planned, Which

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException

from notify.kafka.cluster import Cluster
from notify.kafka.transactional import TransactionalProducer
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
