"""Waits for the brokers' answers to records within a transaction."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Producer

from notify.kafka.transactional import TransactionalProducer

STEP_SECONDS = 0.25


def flush(producer: Producer | TransactionalProducer, is_refused: Callable[[], object], seconds: float) -> None:
    """Wait up to `seconds` until the brokers have answered all records. `is_refused`: whether they refused any.

    After a refusal the transaction can only be aborted, and the client sends no more of its records. So this waits only
    for the records sent with the refused one, whose answers arrive together.
    """
    deadline = time.monotonic() + seconds
    while producer.flush(min(STEP_SECONDS, seconds)) and not is_refused() and time.monotonic() < deadline:
        pass
    if is_refused():
        producer.flush(STEP_SECONDS)
