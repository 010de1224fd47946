"""Wishes of operators for groups over Kafka, kept in the topic `notify-control`: consumers obey within seconds."""

from __future__ import annotations

from collections.abc import Callable

from notify.kafka import control
from notify.kafka.brokers import make_topics
from notify.kafka.control import Control
from notify.server.groups.kafka.answers import CALL_SECONDS
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopic

TRANSACTIONAL_ID = "notify-control"


class Wishes:
    """The newest wish for each group. One thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._by_group: dict[str, Control] = {}
        self._topic = CompactedTopic(brokers, control.TOPIC, self._by_group.clear)

    def read(self) -> dict[str, Control]:
        """By group, as it is now. Raises KafkaException, Unavailable, InvalidRequest."""
        for group, value, _ in self._topic.news():
            self._by_group[group] = Control.of(value)
        return self._by_group

    def change(self, group: str, change: Callable[[Control], Control]) -> None:
        """Replace a group's wish by what `change` makes of the present one, which no other server changes meanwhile.

        Raises KafkaException, Unavailable.
        """
        make_topics(self._brokers.cluster, [control.TOPIC], compacted=True)
        producer = self._brokers.cluster.producer({"transactional.id": TRANSACTIONAL_ID})
        producer.init_transactions(CALL_SECONDS)  # from here on another server's change cannot be committed
        changed = change(self.read().get(group, Control()))
        producer.begin_transaction()
        producer.produce(control.TOPIC, changed.encoded(), group.encode(), partition=0)
        producer.commit_transaction(CALL_SECONDS)

    def close(self) -> None:
        self._topic.close()
