"""A producer of transactions that three faults of Kafka's client, librdkafka 2.16, cannot harm.

After brokers had died it was seen to wait for minutes, without a bound, in `send_offsets_to_transaction`: calls end in
time here.

And it may lose a record. A broker stores a record of a transaction, and its answer gets lost; the transaction is taken
back while the record waits to be sent again. The client then gives the record's sequence number to the next record for
that partition. The broker takes that one for a repetition of the first and answers that it is stored, though what it
has belongs to the transaction that was taken back. So a producer whose records may have been stored without an answer
begins no other transaction. A new one of the same transactional id has another epoch, in which numbers begin anew.

And it may wait, while it takes a transaction back, for a record that it does not send: it empties its queue once, and a
record whose connection breaks after that comes into the queue again. Each call empties the queue anew.
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
"""A call of the client may end so long after its time, and is waited for."""


ABORT_SECONDS = 2.0
"""A call that takes a transaction back gets so long before it is made again."""


class TransactionalProducer:
    """Kafka's producer. Once a call hangs, each later one fails at once: whoever has it makes a new one.

    A new producer of the same transactional id ends what the hanging one has open.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._hangs = False
        self.is_spent = False
        """Records of a transaction that was taken back may have been stored: `begin_transaction` fails from then on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def init_transactions(self, seconds: float) -> None:
        """As the client's. Raises KafkaException, with _TIMED_OUT where the call hangs."""
        self._within(seconds, self._producer.init_transactions)

    def begin_transaction(self) -> None:
        """As the client's. Raises KafkaException, also for a producer that is spent: whoever has it makes a new one."""
        if self.is_spent:
            raise KafkaException(
                KafkaError(KafkaError._STATE, "the client may lose records after what it took back: a new one is made")
            )
        self._producer.begin_transaction()

    def produce(self, *given: Any, on_delivery: OnDelivery | None = None, **named: Any) -> None:
        """As the client's."""

        def answered(error: KafkaError | None, record: Any) -> None:
            if error is not None and error.code() not in NEVER_STORED:
                self.is_spent = True
            if on_delivery is not None:
                on_delivery(error, record)

        self._producer.produce(*given, **named, on_delivery=answered)  # type: ignore[misc]

    def send_offsets_to_transaction(self, positions: list[Any], group: Any, seconds: float) -> None:
        """As `init_transactions`."""
        self._within(seconds, partial(self._producer.send_offsets_to_transaction, positions, group))

    def commit_transaction(self, seconds: float) -> None:
        """As `init_transactions`. Where it hangs, the transaction may be committed or not."""
        self._within(seconds, self._producer.commit_transaction)

    def abort_transaction(self, seconds: float) -> None:
        """As `init_transactions`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > ABORT_SECONDS:
            try:
                self._within(ABORT_SECONDS, self._producer.abort_transaction)
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
            else:
                return
        self._within(max(0.0, left), self._producer.abort_transaction)

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
