"""A client of Kafka hangs in a call of a transaction, whatever time it was given: the group continues with another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from notify.client import Consumer, DeadLetter
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.kafka import committed

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException, Producer

from notify.client.kafka import settling, transactions
from notify.kafka import cluster, transactional
from notify.kafka.groups import dead_letter_topic
from notify.kafka.transactional import TransactionalProducer
from tests.support.kafka_consumers import make_topic, produce, progress

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "mode", "is_made"),
    [
        pytest.param("init_transactions", "failover", False, marks=pytest.mark.long),
        pytest.param("send_offsets_to_transaction", "shared", False, marks=pytest.mark.long),
        ("commit_transaction", "shared", True),
        pytest.param("init_transactions", "shared", False, marks=pytest.mark.long),
        pytest.param("send_offsets_to_transaction", "failover", False, marks=pytest.mark.long),
        pytest.param("commit_transaction", "shared", False, marks=pytest.mark.long),
        pytest.param("commit_transaction", "failover", False, marks=pytest.mark.long),
        pytest.param("commit_transaction", "failover", True, marks=pytest.mark.long),
    ],
)
def test_a_client_that_hangs_is_left_to_itself(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, mode: str, call: str, is_made: bool
) -> None:
    """Its commit never ended, and with it none of the consumer's: the group stood still. Where it was carried out
    nevertheless (`is_made`), what had left with it left once more."""
    hung, goes_on = threading.Event(), threading.Event()

    class Hanging(Producer):
        """Kafka's producer. The first such call of a transactional one waits after it was made, or is never made."""

        def hangs(self) -> bool:
            is_first = not hung.is_set()
            hung.set()
            if is_first:
                goes_on.wait()
            return is_first

    def hanging(self: Hanging, *given: Any) -> Any:
        if is_made and not hung.is_set():
            getattr(Producer, call)(self, *given)
        return None if self.hangs() else getattr(Producer, call)(self, *given)

    monkeypatch.setattr(Hanging, call, hanging, raising=False)
    monkeypatch.setattr(cluster, "Producer", Hanging)
    monkeypatch.setattr(transactional, "MORE_SECONDS", 0.5)
    monkeypatch.setattr(settling, "CALL_SECONDS", 5.0)
    monkeypatch.setattr(transactions, "CALL_SECONDS", 5.0)
    make_topic(kafka_url, unique)
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(unique, mode=mode, start="earliest")
    def handle(message: Any) -> None:
        raise DeadLetter("no use")

    produce(kafka_url, unique, ["a", "b", "c"])
    with running(consumer):
        assert hung.wait(60)
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's position")
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 3, "everything to be done")
        produce(kafka_url, unique, ["d"])
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 4, "the group to continue")
    letters = committed(kafka_url, dead_letter_topic(unique), 4)
    assert sorted(letter.value() for letter in letters) == [b"a", b"b", b"c", b"d"]
    goes_on.set()


@pytest.mark.long
def test_a_fatal_kafka_error_is_raised_as_an_exception(kafka_url: str, unique: str) -> None:
    """A client that found it in one callback, and then called its logger, raised what no `except` catches: it ended the
    thread of a sink, whose bridge waited for the result for ever."""
    make_topic(kafka_url, unique, 4)
    kafka = cluster.Cluster.of(kafka_url)
    for number in range(8):  # about one in three was raised so
        own = {"transactional.id": f"{unique}-{number}"}
        fenced, other = kafka.transactional_producer(own), kafka.transactional_producer(own)
        fenced.init_transactions(PATIENCE_SECONDS)
        fenced.begin_transaction()
        fenced.produce(unique, b"first", partition=0)
        fenced.flush(PATIENCE_SECONDS)
        other.init_transactions(PATIENCE_SECONDS)

        def write(fenced: TransactionalProducer = fenced) -> None:
            for partition in range(4):
                fenced.produce(unique, b"second", partition=partition)  # raises it too, if it is known so early
            fenced.flush(PATIENCE_SECONDS)

        with ThreadPoolExecutor(1) as calls:
            assert isinstance(calls.submit(write).exception(2 * PATIENCE_SECONDS), KafkaException)
