"""Transactions: commits records for other topics and the group's offsets in Kafka's transactions."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import error_of
from notify.client.kafka.retries import Departure
from notify.client.kafka.topics import RECORD_BYTES
from notify.kafka.cluster import Cluster
from notify.kafka.codes import FENCED, TOO_LARGE
from notify.kafka.groups import transactional_id
from notify.kafka.transactional import TransactionalProducer, flush
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

CALL_SECONDS = 20.0
TRANSACTION_SECONDS = 10.0
"""How long the transaction of a killed process delays the readers of its topics."""
OUTCOME_SECONDS = 120.0
"""How long to ask for the outcome of a transaction: a frozen broker keeps its connections for a minute."""


class DepartureTooLarge(Exception):
    """A departure is too large for its topic."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(departure.topic)
        self.departure = departure


class OutcomeUnknown(Exception):
    """The outcome of a transaction with these offsets is unknown. Claiming a new producer ends the transaction."""

    def __init__(self, error: KafkaException, offsets: list[TopicPartition]) -> None:
        super().__init__(error)
        self.error = error
        self.offsets = offsets


class Transactions:
    """Runs one transaction at a time; each call is made in a thread. The first transaction claims the producer, and so
    does the next one after a failure."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._producer: TransactionalProducer | None = None
        self._is_closed = False

    @property
    def are_claimed(self) -> bool:
        return self._producer is not None

    def claim(self) -> None:
        """Make the producer, which fences any other producer with its transactional id. Raises KafkaException."""
        settings = {
            "transactional.id": transactional_id(
                self._plan.kafka_group, "" if self._plan.sharing == "owner" else self._plan.instance
            ),
            "transaction.timeout.ms": round(TRANSACTION_SECONDS * 1000),
            "message.max.bytes": RECORD_BYTES,
        }
        producer = self._cluster.transactional_producer(settings)
        producer.init_transactions(CALL_SECONDS)
        self._producer = producer
        if self._is_closed:  # meanwhile
            self._producer = None

    def commit(self, leaving: list[Departure], offsets: list[TopicPartition], group: Any) -> None:
        """Commit departures and offsets, all or none.

        Raises KafkaException if nothing is committed; OutcomeUnknown; DepartureTooLarge.
        """
        if self._producer is None:
            self.claim()
        producer = self._producer
        assert producer is not None
        refused: list[tuple[Departure, KafkaError]] = []
        is_ending = False
        try:
            producer.begin_transaction()
            for departure in leaving:
                self._produce(producer, departure, refused)
            flush(producer, lambda: refused, CALL_SECONDS)
            producer.send_offsets_to_transaction(offsets, group, CALL_SECONDS)
            is_ending = True
            self._end(producer)
            if producer.is_spent:
                self._drop(producer)
        except KafkaException as raised:
            is_over = error_of(raised).fatal() or error_of(raised).code() in FENCED
            is_aborted = not is_over and self._abort(producer)
            if not is_aborted or producer.is_spent:
                self._drop(producer)
            if is_ending and not is_aborted:
                raise OutcomeUnknown(raised, offsets) from raised
            too_large = next((departure for departure, error in refused if error.code() in TOO_LARGE), None)
            if too_large is not None and too_large.has_body:
                raise DepartureTooLarge(too_large) from raised
            raise

    def _produce(
        self, producer: TransactionalProducer, departure: Departure, refused: list[tuple[Departure, KafkaError]]
    ) -> None:
        """Produce a departure. If Kafka or its client refuses it, now or later, it is added to `refused`."""

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                refused.append((departure, error))

        record = departure.item.record
        value, key = (record.value(), record.key()) if departure.has_body else (None, None)
        try:
            producer.produce(
                departure.topic, value, key,
                partition=departure.partition, headers=departure.headers, on_delivery=delivered,
            )  # fmt: skip
        except KafkaException as raised:
            delivered(error_of(raised), record)
            raise

    def _end(self, producer: TransactionalProducer) -> None:
        """Commit a transaction, and ask for its outcome as long as the brokers may need.

        If it were given up while its outcome is unknown, the next transaction would write its records again.
        """
        deadline = time.monotonic() + OUTCOME_SECONDS
        while True:
            try:
                return producer.commit_transaction(CALL_SECONDS)
            except KafkaException as raised:
                error = error_of(raised)
                if not error.retriable() or time.monotonic() > deadline:
                    raise
                log.debug("Kafka has not said yet whether a transaction is committed: %s", error.str())

    def _abort(self, producer: TransactionalProducer) -> bool:
        """Abort the transaction; returns whether it is surely aborted."""
        try:
            producer.abort_transaction(CALL_SECONDS)
        except KafkaException as raised:
            # A new producer with the same id aborts the transaction.
            log.debug("Kafka does not abort a transaction: %s", error_of(raised).str())
            return False
        return True

    def close(self) -> None:
        """End the producer, with its threads and connections, also one that is being claimed.

        Kafka's client has no call for this: it ends with its last reference, and waits for its threads then.
        """
        self._is_closed = True
        self._producer = None

    def _drop(self, producer: TransactionalProducer) -> None:
        """Forget a producer, unless it was replaced already: a commit may fail because a new claim has fenced it."""
        if self._producer is producer:
            self._producer = None
