"""Deletes records that have moved: the wheels' topics do not delete records by age."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from notify.movers.sinks.delays.wheels import Place

log = logging.getLogger("notify.delays")

CLEAN_SECONDS = 30.0


class Cleaning:
    """Makes the brokers delete records before the committed offsets, now and then."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._offsets: dict[Place, int] = {}
        self._requests: Mapping[Any, Any] = {}
        self._cleaned_at = time.monotonic()

    def moved(self, offsets: Mapping[Place, int]) -> None:
        """Record that the records before these offsets have moved."""
        self._offsets.update(offsets)

    def clean(self) -> None:
        """Send a request every CLEAN_SECONDS; log if the brokers refused the last request."""
        if time.monotonic() - self._cleaned_at < CLEAN_SECONDS or not self._offsets:
            return
        self._cleaned_at = time.monotonic()
        self._report()
        self._requests = self._admin.delete_records([TopicPartition(*place, n) for place, n in self._offsets.items()])
        self._offsets.clear()

    def _report(self) -> None:
        refused = []
        for request in self._requests.values():
            if request.done():
                try:
                    request.result()
                except KafkaException as raised:
                    refused.append(raised.args[0])
        if refused:
            log.warning("Kafka did not delete delayed messages that have moved on: %s", refused[0].str())
