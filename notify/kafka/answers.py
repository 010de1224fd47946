"""Answers of Kafka's client for administration, which comes with each as a future."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""The client itself says that a call has timed out, a moment after its time."""


def answered(answer: Future[T], seconds: float) -> T:
    """Wait for an answer to a call that may take so long. Its client is to be kept meanwhile: with it the answer goes.

    Raises KafkaException, also where there is no answer in time.
    """
    try:
        return answer.result(seconds + GRACE_SECONDS)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
