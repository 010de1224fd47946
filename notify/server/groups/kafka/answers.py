"""Answers of Kafka's brokers to many questions at a time, within one bound for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaError

from notify.kafka import answers
from notify.kafka.codes import AWAY

K = TypeVar("K")
T = TypeVar("T")

CALL_SECONDS = 5.0
"""How long people wait for the brokers: shorter than bridges and consumers do."""
PASSING = frozenset(
    (
        KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.CONCURRENT_TRANSACTIONS,
    )
)  # fmt: skip
"""Answers while a partition, group or transaction has no leader that is ready, or the client knows an earlier one."""
AGAIN = PASSING | {KafkaError._NOENT, KafkaError._PARTIAL}
"""After these the brokers are asked again at once: the client met no leader of any partition that it was asked for, or
not all brokers have answered it."""


def passes(error: KafkaError) -> bool:
    """Whether a reader that meets this error goes on by itself after a while."""
    return error.retriable() or error.code() in PASSING or error.code() in AWAY


def gathered(asked: Mapping[K, Future[T]]) -> dict[K, T | KafkaError]:
    """The answers to many calls, all of them within CALL_SECONDS, see notify/kafka/answers.py. Raises TimeoutError."""
    return answers.gathered(asked, CALL_SECONDS)
