"""A transactional producer that works around three faults of Kafka's client, librdkafka 2.16.

First, after brokers had died the client waited for minutes in `send_offsets_to_transaction`, without a bound. Here
calls end in time.

Second, the client may lose a record. A broker stores a record of a transaction, but its answer gets lost, and the
transaction is aborted while the record waits to be sent again. The client then gives the record's sequence number to
the next record for that partition. The broker regards that record as a repetition of the first and answers that it is
stored, although the stored one belongs to the aborted transaction. So a producer whose records may have been stored
without an answer begins no other transaction. A new producer with the same transactional id has another epoch, in which
sequence numbers begin anew.

Third, while it aborts a transaction, the client may wait for a record that it does not send: it empties its queue once,
and a record whose connection breaks after that is put into the queue again. Here each call empties the queue again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from notify.kafka.bounded import Hangs, within
from notify.kafka.codes import NEVER_STORED

log = logging.getLogger("notify.kafka")
OnDelivery = Callable[[KafkaError | None, Any], None]

MORE_SECONDS = 10.0
"""How long after its time-out a call of the client may still end before it counts as hanging."""


ABORT_SECONDS = 2.0
"""The time-out of one attempt to abort a transaction."""


class TransactionalProducer:
    """Kafka's producer. After a call has hung, each later call fails immediately, and the caller makes a new producer.

    A new producer with the same transactional id ends the open transaction of the hanging one.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._hangs = False
        self.is_spent = False
        """Records of an aborted transaction may have been stored, so that `begin_transaction` fails from now on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def init_transactions(self, seconds: float) -> None:
        """The client's method. Raises KafkaException, with _TIMED_OUT if the call hangs."""
        self._within(seconds, self._producer.init_transactions)

    def begin_transaction(self) -> None:
        """The client's method. Also raises KafkaException if the producer is spent: then the caller makes a new one."""
        if self.is_spent:
            raise KafkaException(
                KafkaError(KafkaError._STATE, "the client may lose records after what it took back: a new one is made")
            )
        self._producer.begin_transaction()

    def produce(self, *args: Any, on_delivery: OnDelivery | None = None, **kwargs: Any) -> None:
        """The client's method."""

        def answered(error: KafkaError | None, record: Any) -> None:
            if error is not None and error.code() not in NEVER_STORED:
                self.is_spent = True
            if on_delivery is not None:
                on_delivery(error, record)

        self._producer.produce(*args, **kwargs, on_delivery=answered)  # type: ignore[misc]

    def send_offsets_to_transaction(self, positions: list[Any], group: Any, seconds: float) -> None:
        """The client's method, bounded like `init_transactions`."""
        self._within(seconds, partial(self._producer.send_offsets_to_transaction, positions, group))

    def commit_transaction(self, seconds: float) -> None:
        """The client's method, bounded like `init_transactions`. If it hangs, the outcome is unknown."""
        self._within(seconds, self._producer.commit_transaction)

    def abort_transaction(self, seconds: float) -> None:
        """The client's method, bounded like `init_transactions`."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > ABORT_SECONDS:
            try:
                self._within(ABORT_SECONDS, self._producer.abort_transaction)
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
            else:
                return
        self._within(max(0.0, remaining), self._producer.abort_transaction)

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
