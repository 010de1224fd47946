"""Refused messages over Kafka: those beside sources, as bridges and relays say, and delayed ones that wait in Kafka."""

from __future__ import annotations

import itertools
import time

import msgspec
import structlog

from notify.kafka import refusals, undelivered
from notify.kafka.undelivered import CODE, SOURCE, Undelivered
from notify.server.core.refusals import MOST_SHOWN, TEXT_CHARACTERS
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics, News
from notify.wire import RefusedReport, RefusedTransaction

log = structlog.get_logger("notify.server")

MOST_HELD = 10_000
"""The most delayed messages that are counted."""


class RefusedOverKafka:
    """Tells the server's own list what Kafka has of refused messages. One thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._reports: dict[str, tuple[RefusedReport, int]] = {}
        self._told = CompactedTopics(brokers, lambda _: self._reports.clear())
        self._waiting: dict[int, RefusedTransaction] = {}
        self._decided: set[int] = set()
        self._delayed = CompactedTopics(brokers, self._forget)

    def read(self) -> dict[str, tuple[RefusedReport, int]]:
        """By source: what waits for a decision, and when that was said. Raises KafkaException, Unavailable."""
        for record in self._told.news([refusals.TOPIC]):
            try:
                self._reports[record.key] = msgspec.json.decode(record.value or b"", type=RefusedReport), record.at_us
            except msgspec.DecodeError as error:  # of a later version, or of another tool
                log.warning("kafka_refused_not_read", source=record.key[:100], reason=str(error)[:300])
        for record in self._delayed.news([undelivered.TOPIC, undelivered.DECISIONS]):
            self._note(record)
        first = list(itertools.islice(self._waiting.values(), MOST_SHOWN))
        return self._reports | {SOURCE: (RefusedReport(len(self._waiting), first), time.time_ns() // 1000)}

    def close(self) -> None:
        self._told.close()
        self._delayed.close()

    def _note(self, record: News) -> None:
        if record.topic == undelivered.DECISIONS:
            if record.key.isdigit():
                self._decided.add(int(record.key))
                self._waiting.pop(int(record.key), None)
        elif record.offset not in self._decided and len(self._waiting) < MOST_HELD:
            m = Undelivered.of(record.offset, record.at_us, None, b"", record.headers)
            self._waiting[record.offset] = RefusedTransaction(m.id, m.topic, CODE, m.detail[:TEXT_CHARACTERS])

    def _forget(self, topic: str) -> None:
        (self._decided if topic == undelivered.DECISIONS else self._waiting).clear()
