"""Answers of Kafka's brokers to many questions at a time, within one bound for all of them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

K = TypeVar("K")
T = TypeVar("T")

CALL_SECONDS = 5.0
"""How long people wait for the brokers: shorter than bridges and consumers do."""
_LATER_SECONDS = 1.0
"""The client itself says that a call took CALL_SECONDS, a little later."""
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
AWAY = frozenset((KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE))
"""Errors of the client where brokers do not answer."""


GONE = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION))
"""Answers about a topic that was deleted."""


def passes(error: KafkaError) -> bool:
    """Whether a reader that meets this error goes on by itself after a while."""
    return error.retriable() or error.code() in PASSING or error.code() in AWAY


def gathered(asked: Mapping[K, Future[T]]) -> dict[K, T | KafkaError]:
    """The answers; the brokers' error where they refused one.

    None is left behind: a client that is given up while calls of it are under way takes their answers with it.
    Raises TimeoutError.
    """
    waited = concurrent.futures.wait(asked.values(), CALL_SECONDS + _LATER_SECONDS)
    if waited.not_done:
        raise TimeoutError
    answers: dict[K, T | KafkaError] = {}
    for name, answer in asked.items():
        try:
            answers[name] = answer.result()
        except KafkaException as raised:
            answers[name] = raised.args[0]
        except RuntimeError as raised:  # the client's own: it got fewer answers than it asked for
            answers[name] = KafkaError(KafkaError._PARTIAL, str(raised))
    return answers
