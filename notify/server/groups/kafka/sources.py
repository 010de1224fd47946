"""Positions of sources, and the messages that they refused: what bridges and relays publish of them to Kafka."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from notify.kafka.positions import Standing, positions_topic
from notify.kafka.refusals import REFUSED
from notify.kafka.undelivered import CODE, DECISIONS, SOURCE, TOPIC, Decision, Undelivered
from notify.protocol.wire import UNDECODABLE, RefusedReport, RefusedTransaction, instant
from notify.server.core.reports import MOST_SHOWN, TEXT_CHARACTERS
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics, News, row_of

log = structlog.get_logger("notify.server")

NEWEST = 1000
"""How many of the newest records are read: each batch of a source writes its position with the same key."""


class Sources:
    """The newest position of each source. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._known: dict[str, tuple[Standing, int]] = {}
        """(position, time) by topic."""
        self._topics = CompactedTopics(brokers, lambda topic: self._known.pop(topic, None), NEWEST)

    def read(self, topics: Iterable[str]) -> dict[str, tuple[Standing, int]]:
        """(position, time in microseconds since 1970) by source, from these topics.

        Raises KafkaException, Unavailable.
        """
        first = positions_topic("")
        wanted = [topic for topic in topics if topic.startswith(first)]
        for topic, key, value, at_us, *_ in self._topics.news(wanted):
            if value and key == topic.removeprefix(first):  # not a part of a base
                try:
                    self._known[topic] = msgspec.json.decode(value, type=Standing), at_us
                except UNDECODABLE as error:  # of a later version, or of another tool: the earlier position is shown
                    log.warning("kafka_position_not_read", source=key[:100], reason=str(error)[:300])
        return {topic.removeprefix(first): self._known[topic] for topic in wanted if topic in self._known}

    def close(self) -> None:
        self._topics.close()


def shown(standings: dict[str, tuple[Standing, int]], now_us: int) -> list[dict[str, Any]]:
    """The rows of `GET bridges`. Kafka keeps no count of a source's transactions, and no lag."""
    return [
        {
            "source": source,
            "epoch": standing.epoch,
            "position": standing.position,
            "rows": None,
            "updated_at": instant(at_us),
            "silent_seconds": round((now_us - at_us) / 1e6, 3),
            "lag_seconds": None,
            "refused": None,
            "note": "",
            "retained_bytes": None,
            "retained_left_bytes": None,
            "slot_age_transactions": None,
        }
        for source, (standing, at_us) in sorted(standings.items())
    ]


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
