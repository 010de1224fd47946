"""Deleting what has moved on: the wheels' topics keep nothing by its age."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from notify.kafka.cluster import Cluster
from notify.sinks.delays.wheels import Place

log = logging.getLogger("notify.delays")

CLEAN_SECONDS = 30.0


class Cleaning:
    """Has the brokers delete, now and then, what is before the offsets that were committed."""

    def __init__(self, cluster: Cluster) -> None:
        self._admin = cluster.admin()
        self._offsets: dict[Place, int] = {}
        self._asked: Mapping[Any, Any] = {}
        self._at = time.monotonic()

    def moved(self, offsets: Mapping[Place, int]) -> None:
        """Nothing before these offsets is needed."""
        self._offsets.update(offsets)

    def clean(self) -> None:
        """Ask the brokers where it is time to; says what they answered the last time, if they refused."""
        if time.monotonic() - self._at < CLEAN_SECONDS or not self._offsets:
            return
        self._at = time.monotonic()
        self._report()
        self._asked = self._admin.delete_records([TopicPartition(*place, n) for place, n in self._offsets.items()])
        self._offsets.clear()

    def _report(self) -> None:
        refused = []
        for asked in self._asked.values():
            if asked.done():
                try:
                    asked.result()
                except KafkaException as raised:
                    refused.append(raised.args[0])
        if refused:
            log.warning("Kafka did not delete delayed messages that have moved on: %s", refused[0].str())
