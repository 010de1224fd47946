"""Answers of Kafka's client for administration, which comes with each as a future."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

K = TypeVar("K")
T = TypeVar("T")

GRACE_SECONDS = 5.0
"""The client itself says that a call has timed out, a moment after its time."""
GATHERED_GRACE_SECONDS = 1.0


def answered(answer: Future[T], seconds: float) -> T:
    """Wait for an answer to a call that may take so long. Its client is to be kept meanwhile: with it the answer goes.

    Raises KafkaException, also where there is no answer in time.
    """
    try:
        return answer.result(seconds + GRACE_SECONDS)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None


def offset_of(answer: Any) -> int:
    """The offset that an answer of `list_offsets` tells, -1 for an instant behind the last record.

    Raises KafkaException where it tells none: a client answers so, and without an error, while a partition's leader
    changes. Taken for an end, it would lie before a group's position, and the group would begin anew.
    """
    offset: int = answer.offset
    if offset == OFFSET_INVALID:
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
    return offset


def gathered(asked: Mapping[K, Future[T]], seconds: float) -> dict[K, T | KafkaError]:
    """The answers to many calls that may take so long; the brokers' error where they refused one.

    None is left behind: a client that is given up while calls of it are under way takes their answers with it.
    Raises TimeoutError.
    """
    waited = concurrent.futures.wait(asked.values(), seconds + GATHERED_GRACE_SECONDS)
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
