"""The ids of topics: one that was deleted and made anew has another, however many records it has."""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from notify.kafka.answers import gathered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import GONE

CALL_SECONDS = 10.0


def topic_ids(admin: AdminClient, topics: Collection[str], seconds: float) -> dict[str, str]:
    """The ids of those of the topics that there are, by name. Raises KafkaException, TimeoutError."""
    if not topics:
        return {}
    asked = admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=seconds)
    ids = {}
    for name, answer in gathered(asked, seconds).items():
        if not isinstance(answer, KafkaError):
            ids[name] = str(answer.topic_id)
        elif answer.code() not in GONE:
            raise KafkaException(answer)
    return ids


class TopicIds:
    """The ids of the topics of a consumer, as the brokers said last."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin: AdminClient | None = None
        self._known: dict[str, str] = {}

    def look(self, topics: Collection[str]) -> None:
        """Ask for them; a topic that is missing keeps the id that it had. Blocks. Raises KafkaException."""
        admin, self._admin = self._admin or self._cluster.admin(), None
        try:
            self._known |= topic_ids(admin, topics, CALL_SECONDS)
        except TimeoutError:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
        self._admin = admin  # one that was not answered is not asked again

    def of(self, topic: str) -> str:
        """Empty where it is not known."""
        return self._known.get(topic, "")
