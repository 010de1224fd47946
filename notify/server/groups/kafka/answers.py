"""Gathers the answers of Kafka's brokers to many calls, within one time limit for all."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaError

from notify.kafka import calls
from notify.kafka.codes import AWAY

K = TypeVar("K")
T = TypeVar("T")

CALL_SECONDS = 5.0
"""How long a person's request waits for the brokers: shorter than bridges and consumers wait."""
PASSING = frozenset(
    (
        KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.CONCURRENT_TRANSACTIONS,
    )
)  # fmt: skip
"""Errors while a partition, group or transaction has no ready leader, or the client still knows an earlier one."""
AGAIN = PASSING | {KafkaError._NOENT, KafkaError._PARTIAL}
"""Errors after which the brokers are asked again immediately: the client found no leader for any of the partitions, or
not all brokers have answered."""


def passes(error: KafkaError) -> bool:
    """Whether a reader continues by itself after this error."""
    return error.retriable() or error.code() in PASSING or error.code() in AWAY


def gathered(asked: Mapping[K, Future[T]]) -> dict[K, T | KafkaError]:
    """The answers to many calls, within CALL_SECONDS for all; see notify/kafka/calls.py. Raises TimeoutError."""
    return calls.gathered(asked, CALL_SECONDS)
