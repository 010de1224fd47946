"""A producer of transactions whose calls end in time, also where Kafka's client does not end them.

librdkafka 2.16 was seen to wait for minutes, without a bound, in `send_offsets_to_transaction`, after brokers had died.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from notify.kafka.bounded import Hangs, within

log = logging.getLogger("notify.kafka")

MORE_SECONDS = 10.0
"""A call of the client may end so long after its time, and is waited for."""


class TransactionalProducer:
    """Kafka's producer. Once a call hangs, each later one fails at once: whoever has it makes a new one.

    A new producer of the same transactional id ends what the hanging one has open.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._hangs = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def init_transactions(self, seconds: float) -> None:
        """As the client's. Raises KafkaException, with _TIMED_OUT where the call hangs."""
        self._within(seconds, self._producer.init_transactions)

    def send_offsets_to_transaction(self, positions: list[Any], group: Any, seconds: float) -> None:
        """As `init_transactions`."""
        self._within(seconds, partial(self._producer.send_offsets_to_transaction, positions, group))

    def commit_transaction(self, seconds: float) -> None:
        """As `init_transactions`. Where it hangs, the transaction may be committed or not."""
        self._within(seconds, self._producer.commit_transaction)

    def abort_transaction(self, seconds: float) -> None:
        """As `init_transactions`."""
        self._within(seconds, self._producer.abort_transaction)

    def _within(self, seconds: float, call: Callable[[float], None]) -> None:
        if self._hangs:
            raise _hanging()
        try:
            within(seconds, partial(call, seconds), MORE_SECONDS)
        except Hangs:
            self._hangs = True
            log.warning("Kafka's client does not end a call within %g s, and is left to itself", seconds + MORE_SECONDS)
            raise _hanging() from None


def _hanging() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, "Kafka's client hangs in a transaction"))
