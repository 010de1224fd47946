"""The ids of topics: a topic that was deleted and made again has another id."""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from notify.kafka.calls import gathered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import GONE

CALL_SECONDS = 10.0


def topic_ids(admin: AdminClient, topics: Collection[str], seconds: float) -> dict[str, str]:
    """The ids of the existing topics among `topics`, by name. Raises KafkaException, TimeoutError."""
    if not topics:
        return {}
    calls = admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=seconds)
    ids = {}
    for name, answer in gathered(calls, seconds).items():
        if not isinstance(answer, KafkaError):
            ids[name] = str(answer.topic_id)
        elif answer.code() not in GONE:
            raise KafkaException(answer)
    return ids


class TopicIds:
    """The ids of a consumer's topics, by the brokers' last answers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin: AdminClient | None = None
        self._ids: dict[str, str] = {}

    def look(self, topics: Collection[str]) -> None:
        """Read the ids of topics; a missing topic keeps its earlier id. Blocks. Raises KafkaException."""
        admin, self._admin = self._admin or self._cluster.admin(), None
        try:
            self._ids |= topic_ids(admin, topics, CALL_SECONDS)
        except TimeoutError:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
        self._admin = admin  # a client whose call failed is not used again

    def of(self, topic: str) -> str:
        """The id of a topic; empty if unknown."""
        return self._ids.get(topic, "")
