"""A server's client for the brokers, which is replaced when it has outdated leaders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from notify.kafka.cluster import Cluster
from notify.server.groups.kafka.answers import AGAIN, CALL_SECONDS

T = TypeVar("T")
AGAIN_SECONDS = 0.2
READERS = "notify-readers"
"""The client name of a server's consumers, which are members of no group."""
TRANSACTION_MILLISECONDS = 10_000
"""After this time the brokers end the transaction of a server that died in it."""


class Brokers:
    """The clients of one server. Used by one thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.admin: AdminClient = cluster.admin()

    @contextlib.contextmanager
    def transaction(self, name: str) -> Iterator[Producer]:
        """A producer that fences every earlier one of this transactional id; its transaction ends with the context.

        The body of the context begins the transaction if it writes. A failure aborts it, because an open transaction
        would hide all records written after it. Raises KafkaException.
        """
        own = {"transactional.id": name, "transaction.timeout.ms": TRANSACTION_MILLISECONDS}
        producer = self.cluster.producer(own)
        producer.init_transactions(CALL_SECONDS)
        try:
            yield producer
            producer.commit_transaction(CALL_SECONDS)
        except BaseException:
            with contextlib.suppress(KafkaException):  # no transaction was begun, or the brokers end it
                producer.abort_transaction(CALL_SECONDS)
            raise

    def insist(self, function: Callable[[], T]) -> T:
        """A function's result. After an error in AGAIN it is called again with a new client, for CALL_SECONDS.

        The function may be called several times: it has to read what it wrote before it writes again. Raises
        KafkaException.
        """
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return function()
            except KafkaException as raised:
                if raised.args[0].code() not in AGAIN or time.monotonic() > deadline:
                    raise
            self.admin = self.cluster.admin()  # the earlier client keeps its outdated leaders
            time.sleep(AGAIN_SECONDS)
