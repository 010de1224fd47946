"""Operators' wishes (pauses, resets) for groups over Kafka, in the topic `notify-control`, which consumers obey."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from notify.errors import InvalidRequest
from notify.kafka import control
from notify.kafka.brokers import make_topics
from notify.kafka.control import Control
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics

log = structlog.get_logger("notify.server")

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
        for record in self._topic.news([control.TOPIC], whole=whole):
            try:
                self._by_group[record.key] = Control.of(record.value)
            except InvalidRequest as error:  # from a later version or another tool: the earlier wish holds
                log.warning("kafka_control_not_read", group=record.key[:100], reason=str(error)[:300])
        return self._by_group

    def change(self, group: str, change: Callable[[Control], Control]) -> None:
        """Replace a group's wish by `change` of the present one. No other server can change it meanwhile.

        Raises KafkaException, Unavailable.
        """
        make_topics(self._brokers.cluster, [control.TOPIC], compacted=True)
        with self._brokers.transaction(TRANSACTIONAL_ID) as producer:
            changed = change(self.read(whole=True).get(group, Control()))
            producer.begin_transaction()
            producer.produce(control.TOPIC, changed.encoded(), group.encode(), partition=0)

    def close(self) -> None:
        self._topic.close()
