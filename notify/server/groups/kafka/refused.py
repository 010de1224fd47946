"""Refused messages over Kafka: those that bridges and relays report of their sources, and delayed ones in Kafka."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import replace

from notify.kafka.refusals import REFUSED
from notify.kafka.undelivered import CODE, DECISIONS, SOURCE, TOPIC, Decision, Undelivered
from notify.protocol.wire import RefusedReport, RefusedTransaction
from notify.server.core.reports import MOST_SHOWN, TEXT_CHARACTERS
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics, News, row_of

MOST_HELD = 10_000
"""The most delayed messages that are counted at a time; when half of them are decided, further ones are counted."""


class RefusedOverKafka:
    """The reports of refused messages that are in Kafka. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._reports: dict[str, tuple[RefusedReport, int]] = {}
        self._told = CompactedTopics(brokers, lambda _: self._reports.clear())
        self._waiting: dict[int, Undelivered] = {}
        self._decided: dict[int, Decision] = {}
        self._delayed = CompactedTopics(brokers, self._forget)
        self._has_left_out = False
        """Whether a message was not counted, because MOST_HELD were."""

    def read(self) -> dict[str, tuple[RefusedReport, int]]:
        """(report, when it was written) by source. Raises KafkaException, Unavailable."""
        for source, report, at_us in self._told.rows(REFUSED):
            self._reports[source] = report, at_us
        self._read_delayed([TOPIC, DECISIONS.topic])
        if self._has_left_out and len(self._waiting) <= MOST_HELD // 2:
            self._has_left_out = False
            self._delayed.read_again(TOPIC)
            self._read_delayed([TOPIC])
        first = [
            RefusedTransaction(m.id, m.topic, CODE, m.detail[:TEXT_CHARACTERS])
            for m in itertools.islice(self._waiting.values(), MOST_SHOWN)
        ]
        return self._reports | {SOURCE: (RefusedReport(len(self._waiting), first), time.time_ns() // 1000)}

    def close(self) -> None:
        self._told.close()
        self._delayed.close()

    def _read_delayed(self, topics: Collection[str]) -> None:
        for record in self._delayed.news(topics):
            self._note(record)

    def _note(self, record: News) -> None:
        if record.topic == DECISIONS.topic:
            if (row := row_of(DECISIONS, record)) is not None:
                self._decide(*row)
        elif len(self._waiting) >= MOST_HELD:
            self._has_left_out = True
        else:
            message = replace(Undelivered.of(record.offset, record.at_us, None, b"", record.headers), headers=[])
            decision = self._decided.get(record.offset)
            if decision is None or not decision.is_of(message):
                self._waiting[record.offset] = message

    def _decide(self, offset: int, decision: Decision) -> None:
        self._decided[offset] = decision
        waiting = self._waiting.get(offset)
        if waiting is not None and decision.is_of(waiting):
            del self._waiting[offset]

    def _forget(self, topic: str) -> None:
        (self._decided if topic == DECISIONS.topic else self._waiting).clear()
