"""The wheels' topics at the brokers."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, Unavailable
from notify.kafka.answers import answered
from notify.kafka.brokers import CALL_SECONDS, FOR_NOW, known_topics, not_made
from notify.kafka.cluster import Cluster
from notify.kafka.topics import LARGEST_RECORD
from notify.kafka.undelivered import TOPIC as REFUSED
from notify.sinks.delays.wheels import Wheels

CONFIG = {
    "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "segment.bytes": str(16 << 20),
    "segment.index.bytes": str(256 << 10), "max.message.bytes": str(LARGEST_RECORD),
}  # fmt: skip
"""No record goes by its age. Small segments: what has moved on is deleted by segments."""


def make_wheels(cluster: Cluster, wheels: Wheels) -> None:
    """Make the topics of the wheels where they are missing.

    Raises Unavailable where the brokers do not answer or cannot do it now, InvalidRequest where they refuse, and where
    a topic has too few partitions.
    """
    admin = cluster.admin()
    topics = known_topics(cluster)
    wanted = [(wheel.topic, wheel.slots) for wheel in wheels.wheels] + [(REFUSED, 1)]
    missing = []
    for topic, partitions in wanted:
        if topic not in topics:
            missing.append(NewTopic(topic, num_partitions=partitions, replication_factor=-1, config=CONFIG))
        elif len(topics[topic].partitions) < partitions:
            raise InvalidRequest(
                f"topic {topic!r} has {len(topics[topic].partitions)} partitions; delayed messages need {partitions}: "
                f"kafka-topics.sh --alter --topic {topic} --partitions {partitions}"
            )
    made = admin.create_topics(missing, operation_timeout=CALL_SECONDS) if missing else {}
    for topic, done in made.items():
        try:
            answered(done, CALL_SECONDS)
        except KafkaException as raised:
            error = raised.args[0]
            if error.code() in FOR_NOW:
                raise Unavailable(f"Kafka does not make topic {topic!r} now: {error.str()}") from raised
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise not_made(topic, error, cluster) from raised
