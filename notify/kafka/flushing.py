"""Waiting for the brokers' answers to records within a transaction."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Producer

from notify.kafka.transactional import TransactionalProducer

STEP_SECONDS = 0.25


def flush(producer: Producer | TransactionalProducer, is_refused: Callable[[], object], seconds: float) -> None:
    """Wait until the brokers have answered all records, at most so long. `is_refused`: whether they refused any.

    Once they did, the transaction can only be taken back, and the client sends nothing more of it: only what went
    with the refused record is waited for, whose answers come with its own.
    """
    deadline = time.monotonic() + seconds
    while producer.flush(min(STEP_SECONDS, seconds)) and not is_refused() and time.monotonic() < deadline:
        pass
    if is_refused():
        producer.flush(STEP_SECONDS)
