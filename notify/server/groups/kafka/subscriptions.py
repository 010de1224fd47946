"""The subscriptions that groups' consumers have noted in a topic of Kafka."""

from __future__ import annotations

from collections.abc import Mapping

from notify.kafka.groups import OWN_TOPICS
from notify.kafka.subscriptions import SUBSCRIPTIONS, Place, Subscribed
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics


class Subscriptions:
    """The newest subscription of each group and partition. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._by_group: dict[str, dict[Place, Subscribed]] = {}
        self._topic = CompactedTopics(brokers, lambda _: self._by_group.clear())

    def of_group(self, name: str) -> dict[str, Subscribed]:
        """A group's subscriptions by topic. Raises KafkaException, Unavailable."""
        return {place.topic: subscribed for place, subscribed in self.read().get(name, {}).items()}

    def read(self) -> Mapping[str, Mapping[Place, Subscribed]]:
        """All subscriptions by group and partition. Raises KafkaException, Unavailable."""
        for (group, place), subscribed, _ in self._topic.rows(SUBSCRIPTIONS):
            if not place.topic.startswith(OWN_TOPICS):
                self._by_group.setdefault(group, {})[place] = subscribed
        return self._by_group

    def close(self) -> None:
        self._topic.close()
