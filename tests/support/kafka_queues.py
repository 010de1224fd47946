"""Kafka as the queue of tests that run on a queue server, too (tests/support/queues.py)."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, TopicPartition

from notify.kafka import control
from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS, owner_topic
from notify.kafka.topics import LARGEST_RECORD
from tests.support.clock import PATIENCE_SECONDS
from tests.support.kafka_consumers import is_assigned, progress
from tests.support.queues import Sender


class Kafka:
    """A Kafka node, and a server that shows its groups."""

    is_kafka = True

    def __init__(self, url: str, admin_url: str) -> None:
        self.url, self.admin_url = url, admin_url
        self.sender = Sender(url)
        self._reader: Any = Cluster.of(url).consumer(
            {"group.id": "a-test", "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        )

    def make_topic(self, topic: str, queues: int = 1) -> None:
        make_topics(Cluster.of(f"{self.url}?notify.partitions={queues}"), [topic], largest=LARGEST_RECORD)

    def is_consumed(self, group: str, instances: int = 1) -> bool:
        return is_assigned(self.url, group, instances) or is_assigned(self.url, owner_topic(group))

    def is_settled(self, group: str) -> bool:
        # A group of broadcast has a mark in the topic of orders, which has those of other groups, too.
        known = {place: p for place, p in progress(self.url, group).items() if place[0] != control.TOPIC}
        if all(topic.startswith(OWN_TOPICS) for topic, _ in known):
            return False
        self._reader.assign([TopicPartition(*place, p.offset) for place, p in known.items()])
        unread = set(known)
        while unread:
            record = self._reader.poll(PATIENCE_SECONDS)
            assert record is not None, f"Kafka gives no end of {unread}"
            place = record.topic(), record.partition()
            if record.error() is not None:
                assert record.error().code() == KafkaError._PARTITION_EOF, record.error()
                unread.discard(place)
            elif record.offset() not in known[place].done:
                return False
        return True

    def close(self) -> None:
        self.sender.close()
        self._reader.close()
