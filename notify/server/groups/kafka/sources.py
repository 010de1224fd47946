"""Sources that bridges and relays publish to Kafka: where each stands, and when it was heard of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from notify.kafka.positions import Standing, positions_topic
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopic
from notify.wire import instant


class Sources:
    """The newest position of each source. One thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._topics: dict[str, CompactedTopic] = {}
        self._known: dict[str, tuple[Standing, int]] = {}

    def read(self, topics: Collection[str]) -> dict[str, tuple[Standing, int]]:
        """Position and time (microseconds since 1970) by source. Raises KafkaException, Unavailable."""
        for topic in topics:
            if topic.startswith(positions_topic("")):
                for source, value, at_us in self._reading(topic).news():
                    if value:
                        self._known[source] = msgspec.json.decode(value, type=Standing), at_us
        return {source: at for source, at in self._known.items() if positions_topic(source) in topics}

    def _reading(self, topic: str) -> CompactedTopic:
        source = topic.removeprefix(positions_topic(""))
        if topic not in self._topics:
            self._topics[topic] = CompactedTopic(self._brokers, topic, lambda: self._known.pop(source, None))
        return self._topics[topic]

    def close(self) -> None:
        for topic in self._topics.values():
            topic.close()


def shown(known: dict[str, tuple[Standing, int]], now_us: int) -> list[dict[str, Any]]:
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
        }
        for source, (standing, at_us) in sorted(known.items())
    ]
