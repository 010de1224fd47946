"""Calls of Kafka's client within bounds of time: answers of its admin client, and calls that may hang."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

from notify.runtime.program_log import program_log

K = TypeVar("K")
T = TypeVar("T")
log = program_log("notify.kafka")

GRACE_SECONDS = 5.0
"""How much later than its time-out a call may end: the client itself reports the time-out a moment later."""
GATHERED_GRACE_SECONDS = 1.0
LEAVE_SECONDS = 15.0
"""How long to wait for a broker that does not answer: the group notices by itself that the member is gone."""


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
    without an error. Used as a partition's end, it would be before a group's position, and the group would start over.
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


class Hangs(Exception):
    """A call has not ended in time. It still runs in its thread, so that its client must not be used any more."""


def within(seconds: float, function: Callable[[], T], more: float = 0.0) -> T:
    """Call a function in a thread; its result. Raises the function's errors, and Hangs.

    After `seconds` it waits `more` seconds: if the whole process was frozen, the call can still end then.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="notify-kafka-call", daemon=True).start()
    if not (concurrent.futures.wait([done], seconds).done or concurrent.futures.wait([done], more).done):
        raise Hangs
    return done.result()


def leave(group: str, end: Callable[[], object], seconds: float = LEAVE_SECONDS) -> bool:
    """Call `end`, which closes a group member's clients, in a thread; whether it returned within `seconds`.

    Kafka's client, and its thread, may hang if it is closed during a rebalance. A hanging member still sends
    heartbeats, so that no other member reads its partitions until its `max.poll.interval.ms` is over. If it hangs, the
    clients are abandoned, and must not be used any more. Raises the errors of `end`.
    """
    try:
        within(seconds, end)
    except Hangs:
        log.warning("Kafka's client does not leave group %s within %g s, and is left to itself", group, seconds)
        return False
    return True
