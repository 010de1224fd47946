"""A transaction is over if its client's log has an answer to each request, whatever the order and the connections."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException, Producer

from notify.kafka.exchange import Exchange
from notify.kafka.transactional import TransactionalProducer

LEADER, COORDINATOR = "[thrd:a:9092/1]: a:9092/1", "[thrd:TxnCoordinator]: TxnCoordinator"


def sent(request: str, number: int, connection: str = COORDINATOR) -> tuple[str, str]:
    return "SEND", f"{connection}: Sent {request}Request (v1, 58 bytes @ 0, CorrId {number})"


def partly(request: str, number: int, connection: str = COORDINATOR) -> tuple[str, str]:
    return "SEND", f"{connection}: Sent partial {request}Request (v1, 0+12/58 bytes, CorrId {number})"


def answered(request: str, number: int, connection: str = COORDINATOR) -> tuple[str, str]:
    return "RECV", f"{connection}: Received {request}Response (v1, 6 bytes, CorrId {number}, rtt 2.02ms)"


START = [sent("InitProducerId", 1), answered("InitProducerId", 1)]
ADDED = [sent("AddPartitionsToTxn", 2), answered("AddPartitionsToTxn", 2)]
PRODUCED = [sent("Produce", 2, LEADER), answered("Produce", 2, LEADER)]
ENDED = [sent("EndTxn", 3), answered("EndTxn", 3)]
RETRY = ("RETRY", f"{COORDINATOR}: Retrying EndTxnRequest (v1, 58 bytes, retry 1/2, prev CorrId 3) in 100ms")


@pytest.mark.parametrize(
    ("lines", "is_over"),
    [
        ([*ADDED, *PRODUCED, *ENDED], True),
        ([], True),
        ([sent("Metadata", 9, LEADER), *ADDED, *PRODUCED, *ENDED, sent("FindCoordinator", 10)], True),
        ([*ADDED, partly("Produce", 2, LEADER), *PRODUCED, *ENDED], True),
        # The connection broke, and the same request was answered in another one.
        ([*ADDED, *PRODUCED, sent("EndTxn", 3), RETRY, sent("EndTxn", 5), answered("EndTxn", 5)], False),
        # Its time was over, and it is still under way in the same connection.
        ([*ADDED, *PRODUCED, sent("EndTxn", 3), RETRY, sent("EndTxn", 4), answered("EndTxn", 4)], False),
        # It was answered with an error that may be tried again.
        ([*ADDED, *PRODUCED, *ENDED, RETRY, sent("EndTxn", 4), answered("EndTxn", 4)], False),
        ([*ADDED, *PRODUCED, partly("EndTxn", 3), sent("EndTxn", 5), answered("EndTxn", 5)], False),
        # The same number, in the connection to another broker.
        ([*ADDED, *PRODUCED, sent("EndTxn", 3, LEADER), sent("EndTxn", 3), answered("EndTxn", 3)], False),
        (
            [*ADDED, sent("Produce", 2, LEADER), sent("Produce", 3, LEADER), answered("Produce", 3, LEADER), *ENDED],
            False,
        ),
        ([sent("AddOffsetsToTxn", 7), *ENDED], False),
        ([*ADDED, sent("TxnOffsetCommit", 7, LEADER), *ENDED], False),
        # Another version of the client may say this.
        ([*ADDED, *PRODUCED], False),
        ([*ADDED, *PRODUCED, *ENDED, sent("SomethingNew", 4)], False),
        ([*ADDED, *PRODUCED, ("SEND", "EndTxnRequest goes out"), ("RECV", "EndTxnResponse comes in")], False),
    ],
)
def test_a_transaction_is_over_if_each_request_was_answered(lines: list[tuple[str, str]], is_over: bool) -> None:
    exchange = told(START)
    exchange.begin()
    tell(exchange, lines)
    assert exchange.is_over is is_over


def test_a_client_that_tells_nothing_is_not_believed() -> None:
    exchange = told([("SEND", "InitProducerIdRequest goes out")])
    assert not exchange.tells
    exchange.begin()
    assert not exchange.is_over


def told(lines: list[tuple[str, str]], **settings: str) -> Exchange:
    exchange = Exchange(settings)
    tell(exchange, lines)
    return exchange


def tell(exchange: Exchange, lines: list[tuple[str, str]]) -> None:
    for kind, line in lines:
        exchange.log(logging.DEBUG, "%s [%s] %s", kind, "rdkafka#producer-1", line)


@pytest.mark.parametrize(
    ("settings", "debug", "shown"),
    [
        ({}, "protocol", ["worst"]),
        ({"log_level": "3"}, "protocol", ["worst", "bad"]),
        ({"debug": "eos"}, "protocol,eos", ["worst", "bad", "fine"]),
        ({"debug": "all"}, "protocol,all", ["worst", "bad", "fine", "Sent"]),
    ],
)
def test_only_what_operators_ask_for_is_logged(
    caplog: pytest.LogCaptureFixture, settings: dict[str, str], debug: str, shown: list[str]
) -> None:
    """A client that logged its requests would fill the log."""
    caplog.set_level("INFO", "notify.kafka")  # as commands do
    exchange = Exchange(settings)
    assert exchange.settings["debug"] == debug
    for level, kind, line in [
        (logging.CRITICAL, "FATAL", "worst"), (logging.ERROR, "FAIL", "bad"), (logging.DEBUG, "TXNSTATE", "fine"),
        (logging.DEBUG, *sent("EndTxn", 3)),
    ]:  # fmt: skip
        exchange.log(level, "%s [%s] %s", kind, "rdkafka#producer-1", line)
    assert [word for word in ("worst", "bad", "fine", "Sent") if word in caplog.text] == shown


class Logging(Producer):
    """Kafka's client, in an empty transaction after which it logs lines."""

    def __init__(self, exchange: Exchange, lines: Iterator[list[tuple[str, str]]]) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:9", "log_level": 0})
        self._exchange, self._lines = exchange, lines

    def poll(self, seconds: float = 0.0) -> int:
        tell(self._exchange, next(self._lines, []))
        return 0

    def begin_transaction(self) -> None:
        pass

    def commit_transaction(self, seconds: float = 0.0) -> None:
        pass

    abort_transaction = commit_transaction


@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_producer_with_a_request_without_an_answer_begins_nothing_else(end: str) -> None:
    exchange = told(START)
    good = [*ADDED, *PRODUCED, *ENDED]
    late = [*ADDED, *PRODUCED, sent("EndTxn", 3), RETRY, sent("EndTxn", 4), answered("EndTxn", 4)]
    producer = TransactionalProducer(Logging(exchange, iter([[], good, [], late])), exchange)
    for _ in range(2):
        assert not producer.is_spent
        producer.begin_transaction()
        getattr(producer, end)(1.0)
    assert producer.is_spent
    with pytest.raises(KafkaException, match="a new one is made"):
        producer.begin_transaction()


def test_an_idle_producer_is_drained() -> None:
    """The log of a client waits in memory until somebody takes it."""
    exchange = Exchange({})
    producer = TransactionalProducer(Logging(exchange, iter([START, [], [sent("EndTxn", 3)]])), exchange)
    producer.drain()
    assert exchange.tells
    producer.begin_transaction()
    producer.drain()  # within a transaction its caller takes it
    assert exchange.is_over
