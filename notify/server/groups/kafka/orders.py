"""Operators' wishes (pauses, resets) for groups over Kafka, in the topic `notify-control`, which consumers obey."""

from __future__ import annotations

from collections.abc import Callable

from notify.kafka.control import CONTROL, Control
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics

TRANSACTIONAL_ID = "notify-control"


class Orders:
    """The newest wishes for each group. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._by_group: dict[str, Control] = {}
        self._topic = CompactedTopics(brokers, lambda _: self._by_group.clear())

    def read(self, *, whole: bool = False) -> dict[str, Control]:
        """The wishes by group. If the topic has no leader, those read last are returned, or with `whole` it raises.

        Raises KafkaException, Unavailable.
        """
        for group, wish, _ in self._topic.rows(CONTROL, whole=whole):
            self._by_group[group] = wish
        return self._by_group

    def change(self, group: str, change: Callable[[Control], Control]) -> None:
        """Replace a group's wish by `change` of the present one. No other server can change it meanwhile.

        Raises KafkaException, Unavailable.
        """
        CONTROL.make(self._brokers.cluster)
        with self._brokers.transaction(TRANSACTIONAL_ID) as producer:
            changed = change(self.read(whole=True).get(group, Control()))
            key, value = CONTROL.record(group, changed)
            producer.begin_transaction()
            producer.produce(CONTROL.topic, value, key, partition=0)

    def close(self) -> None:
        self._topic.close()
