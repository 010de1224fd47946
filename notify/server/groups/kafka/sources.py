"""The positions of sources that bridges and relays publish to Kafka, and when they were written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import structlog

from notify.kafka.positions import Standing, positions_topic
from notify.protocol.wire import UNDECODABLE, instant
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics

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
