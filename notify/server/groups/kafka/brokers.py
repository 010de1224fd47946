"""The brokers as one server asks them: a client that is renewed where it has old news of their leaders."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from notify.kafka.cluster import Cluster
from notify.server.groups.kafka.answers import CALL_SECONDS, PASSING

T = TypeVar("T")
AGAIN_SECONDS = 0.2


class Brokers:
    """One thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.admin: AdminClient = cluster.admin()

    def insist(self, function: Callable[[], T]) -> T:
        """A function's result; what passes is asked for again, by a new client, for CALL_SECONDS.

        The function may be called several times: it reads what it wrote before it writes again. Raises KafkaException.
        """
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return function()
            except KafkaException as raised:
                if raised.args[0].code() not in PASSING or time.monotonic() > deadline:
                    raise
            self.admin = self.cluster.admin()  # the earlier one goes on believing in the leaders it knows
            time.sleep(AGAIN_SECONDS)
