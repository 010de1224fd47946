"""Waits for the brokers' answers to records within a transaction."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException, Producer

from notify.kafka.transactional import TransactionalProducer

STEP_SECONDS = 0.25


def flush(producer: Producer | TransactionalProducer, is_refused: Callable[[], object], seconds: float) -> None:
    """Wait until the brokers have answered all records. `is_refused`: whether they refused any.

    After a refusal the transaction can only be aborted, and the client sends no more of its records. So this waits only
    for the records sent with the refused one, whose answers arrive together. Raises KafkaException (_TIMED_OUT) if
    answers are missing after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (missing := producer.flush(min(STEP_SECONDS, seconds))) and not is_refused():
        if time.monotonic() >= deadline:
            why = f"{missing} records have no answer after {seconds:g} s"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, why, txn_requires_abort=True))
    if is_refused():
        producer.flush(STEP_SECONDS)
