"""A broker stores a record, its answer is lost, and the transaction is taken back: the next one loses nothing.

Kafka's client gives the record's sequence number to the next record; see notify/kafka/transactional.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from notify.client import Consumer, DeadLetter
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.kafka import KafkaNode, Wrapped, committed
from tests.support.kafka_proxy import Api, Fault, Which

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException

from notify.kafka.cluster import Cluster
from notify.kafka.groups import dead_letter_topic
from notify.movers.sinks.delays.releaser import releasing as delays_released
from tests.support.delayed import send_delayed, texts_of
from tests.support.kafka_consumers import make_topic, produce, progress

BACKOFF_MILLISECONDS = 5_000
"""The client waits so long before it sends a record again, so that it waits while its transaction is taken back."""


class Watched:
    """A transactional producer of one topic, and what its client reports about itself."""

    def __init__(self, url: str, name: str, *, backoff_milliseconds: int) -> None:
        own = {
            "transactional.id": name, "retry.backoff.ms": backoff_milliseconds,
            "retry.backoff.max.ms": backoff_milliseconds, "statistics.interval.ms": 50, "stats_cb": self._look,
        }  # fmt: skip
        self._reports: list[dict[str, Any]] = []
        self.producer = Cluster.of(url).transactional_producer(own)
        self.producer.init_transactions(PATIENCE_SECONDS)

    def _look(self, statistics: str) -> None:
        self._reports.append(json.loads(statistics))

    def wait_for(self, seen: Callable[[str, int, int], bool], waiting_for: str) -> None:
        """Wait for a report with such a state of the transaction, number of queued records and of those on their way.

        It is the second such report in a row, since the first may be older than this call.
        """

        def is_seen() -> bool:
            self.producer.poll(0.1)
            last = [(report["eos"]["txn_state"], *self._records(report)) for report in self._reports[-2:]]
            return len(last) == 2 and all(seen(*reported) for reported in last)

        self._reports.clear()
        eventually(is_seen, waiting_for)

    @staticmethod
    def _records(report: dict[str, Any]) -> tuple[int, int]:
        partitions = [part for topic in report["topics"].values() for part in topic["partitions"].values()]
        return sum(part["msgq_cnt"] for part in partitions), sum(part["msgs_inflight"] for part in partitions)


@pytest.mark.long
def test_a_record_behind_one_whose_answer_was_lost_is_not_lost(kafka_node: KafkaNode, unique: str) -> None:
    make_topic(kafka_node.url, unique)
    watched = Watched(kafka_node.url, unique, backoff_milliseconds=BACKOFF_MILLISECONDS)
    producer = watched.producer
    producer.begin_transaction()
    cut = kafka_node.proxy.plan(Which(Api.PRODUCE, b"the-text"), Fault.CUT_AFTER)
    producer.produce(unique, b"the-text", partition=0)
    eventually(lambda: cut.has_hit, "the record to be sent")
    watched.wait_for(lambda _, queued, sent: queued == 1 and not sent, "it to wait, though the broker has stored it")
    producer.abort_transaction(PATIENCE_SECONDS)
    assert len(committed(kafka_node.url, unique, 1, uncommitted=True)) == 1
    with pytest.raises(KafkaException, match="a new one is made"):
        producer.begin_transaction()
    producer = Watched(kafka_node.url, unique, backoff_milliseconds=BACKOFF_MILLISECONDS).producer
    producer.begin_transaction()
    producer.produce(unique, b"the-text", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert texts_of(kafka_node.url, unique) == ["the-text"]


@pytest.mark.long
def test_a_transaction_is_taken_back_though_its_record_came_back(kafka_node: KafkaNode, unique: str) -> None:
    """Kafka's client empties its queue, and then takes the record into it again, for as long as the call may last."""
    make_topic(kafka_node.url, unique)
    watched = Watched(kafka_node.url, unique, backoff_milliseconds=100)
    producer = watched.producer
    producer.begin_transaction()
    cut = kafka_node.proxy.plan(Which(Api.PRODUCE, b"the-text"), Fault.CUT_AFTER, until=())
    producer.produce(unique, b"the-text", partition=0)
    watched.wait_for(lambda _, queued, sent: sent == 1, "the record to be sent")
    with ThreadPoolExecutor() as calls:
        aborted = calls.submit(producer.abort_transaction, PATIENCE_SECONDS)
        watched.wait_for(lambda state, queued, sent: state == "BeginAbort", "the transaction to be taken back")
        cut.release()
        aborted.result()
    with pytest.raises(KafkaException, match="a new one is made"):
        producer.begin_transaction()


class Spent(Wrapped):
    """Kafka's producer. Its first transaction with a record fails, after which it is spent."""

    def __init__(self, client: Any, made: list[Any]) -> None:
        super().__init__(client)
        self._is_first = not made
        self._has_record = self._has_failed = False
        made.append(self)

    @property
    def is_spent(self) -> bool:
        return self._has_failed

    def begin_transaction(self) -> None:
        assert not self._has_failed, "a producer that is spent begins no other transaction"
        self._client.begin_transaction()

    def produce(self, *given: Any, **named: Any) -> None:
        self._has_record = True
        self._client.produce(*given, **named)

    def send_offsets_to_transaction(self, *given: Any) -> None:
        if self._is_first and self._has_record:
            self._has_failed = True
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "a test", txn_requires_abort=True))
        self._client.send_offsets_to_transaction(*given)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Have the first producer with this in its transactional id become spent. Returns those that are made."""
    producer = Cluster.producer

    def begin(part: str) -> list[Any]:
        made: list[Any] = []

        def spending(self: Cluster, own: Mapping[str, Any]) -> Any:
            its = producer(self, own)
            return Spent(its, made) if part in str(own.get("transactional.id", "")) else its

        monkeypatch.setattr(Cluster, "producer", spending)
        return made

    return begin


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", pytest.param("failover", marks=pytest.mark.long)])
def test_a_consumer_goes_on_with_a_new_producer(
    kafka_url: str, unique: str, mode: str, spent: Callable[[str], list[Any]]
) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a", "b", "c"])
    made = spent(unique)
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(unique, mode=mode, start="earliest")
    def handle(message: Any) -> None:
        raise DeadLetter("no use")

    with running(consumer):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's position")
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 3, "all to be done")
    assert sorted(texts_of(kafka_url, dead_letter_topic(unique))) == ["a", "b", "c"]
    assert made[0].is_spent and len(made) >= 2


@pytest.mark.long
def test_a_releaser_goes_on_with_a_new_producer(kafka_url: str, unique: str, spent: Callable[[str], list[Any]]) -> None:
    made = spent("notify-delays-")
    send_delayed(kafka_url, unique, ["a", "b", "c"], delay=0.1)
    with delays_released(kafka_url):
        assert sorted(texts_of(kafka_url, unique, 3)) == ["a", "b", "c"]
    assert made[0].is_spent and len(made) >= 2
