"""Waits for the answers of Kafka's admin client, which are futures."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

K = TypeVar("K")
T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How much later than its time-out a call may end: the client itself reports the time-out a moment later."""
GATHERED_GRACE_SECONDS = 1.0


def answered(answer: Future[T], seconds: float) -> T:
    """Wait for the answer to a call with this time-out. The caller must keep the client, or the answer gets lost.

    Raises KafkaException, also if there is no answer in time.
    """
    try:
        return answer.result(seconds + GRACE_SECONDS)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None


def offset_of(answer: Any) -> int:
    """The offset in an answer of `list_offsets`; -1 for an instant after the last record.

    Raises KafkaException if the answer has no offset: while a partition's leader changes, the client answers like this
    without an error. Used as a partition's end, it would be before a group's position, and the group would begin anew.
    """
    offset: int = answer.offset
    if offset == OFFSET_INVALID:
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
    return offset


def gathered(calls: Mapping[K, Future[T]], seconds: float) -> dict[K, T | KafkaError]:
    """Wait for the answers to calls with this time-out; a call that brokers refused has their error.

    It waits for all calls, because the answers of a client that is dropped get lost. Raises TimeoutError.
    """
    waited = concurrent.futures.wait(calls.values(), seconds + GATHERED_GRACE_SECONDS)
    if waited.not_done:
        raise TimeoutError
    answers: dict[K, T | KafkaError] = {}
    for name, answer in calls.items():
        try:
            answers[name] = answer.result()
        except KafkaException as raised:
            answers[name] = raised.args[0]
        except RuntimeError as raised:  # raised by the client if it got too few answers
            answers[name] = KafkaError(KafkaError._PARTIAL, str(raised))
    return answers
