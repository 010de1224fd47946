"""The brokers as one server asks them: a client that is renewed where it has old news of their leaders."""

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
"""The name that consumers of a server go by, which are members of no group."""
TRANSACTION_MILLISECONDS = 10_000
"""The brokers end the transaction of a server that died within it after so long."""


class Brokers:
    """One thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.admin: AdminClient = cluster.admin()

    @contextlib.contextmanager
    def transaction(self, name: str) -> Iterator[Producer]:
        """A producer that fences every earlier one of this transactional id; its transaction ends with the context.

        It is the context that begins one, if it has anything to write. What fails is taken back: a transaction that
        stays open would hide what others write behind it. Raises KafkaException.
        """
        own = {"transactional.id": name, "transaction.timeout.ms": TRANSACTION_MILLISECONDS}
        producer = self.cluster.producer(own)
        producer.init_transactions(CALL_SECONDS)
        try:
            yield producer
            producer.commit_transaction(CALL_SECONDS)
        except BaseException:
            with contextlib.suppress(KafkaException):  # none was begun, or the brokers end it
                producer.abort_transaction(CALL_SECONDS)
            raise

    def insist(self, function: Callable[[], T]) -> T:
        """A function's result; what passes is asked for again, by a new client, for CALL_SECONDS.

        The function may be called several times: it reads what it wrote before it writes again. Raises KafkaException.
        """
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return function()
            except KafkaException as raised:
                if raised.args[0].code() not in AGAIN or time.monotonic() > deadline:
                    raise
            self.admin = self.cluster.admin()  # the earlier one goes on believing in the leaders it knows
            time.sleep(AGAIN_SECONDS)
