"""Makes the wheels' topics at the brokers."""

from __future__ import annotations

from notify.errors import InvalidRequest
from notify.kafka.brokers import known_topics, make_missing, new_topic
from notify.kafka.cluster import Cluster
from notify.kafka.topics import LARGEST_RECORD
from notify.kafka.undelivered import TOPIC as REFUSED
from notify.movers.sinks.delays.wheels import Wheels

CONFIG = {
    "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "segment.bytes": str(16 << 20),
    "segment.index.bytes": str(256 << 10), "max.message.bytes": str(LARGEST_RECORD),
}  # fmt: skip
"""No record is deleted by age. The segments are small, because moved records are deleted by whole segments."""


def make_wheels(cluster: Cluster, wheels: Wheels, *, tells_changed: bool = False) -> None:
    """Make the missing topics of the wheels. `tells_changed`: see make_missing.

    Raises Unavailable if the brokers do not answer or cannot make them now, InvalidRequest if they refuse, or if a
    topic has too few partitions.
    """
    topics = known_topics(cluster)
    wanted = [(wheel.topic, wheel.slots) for wheel in wheels.wheels] + [(REFUSED, 1)]
    for topic, partitions in wanted:
        if topic in topics and len(topics[topic].partitions) < partitions:
            raise InvalidRequest(
                f"topic {topic!r} has {len(topics[topic].partitions)} partitions; delayed messages need {partitions}: "
                f"kafka-topics.sh --alter --topic {topic} --partitions {partitions}"
            )
    topics_of_wheels = [new_topic(topic, partitions, CONFIG) for topic, partitions in wanted]
    make_missing(cluster, topics_of_wheels, tells_changed=tells_changed)
