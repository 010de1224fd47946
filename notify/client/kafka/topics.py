"""Topics: creates the topics that a consumer over Kafka needs, and finds those that match its names and patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import NewTopic, TopicMetadata  # type: ignore[attr-defined]

from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import refusal
from notify.errors import InvalidRequest
from notify.kafka import control, groups
from notify.kafka.brokers import COMPACTED, KEPT, make_missing, new_topic
from notify.kafka.cluster import Cluster
from notify.kafka.rights import REFUSED
from notify.kafka.topics import LARGEST_RECORD

CALL_SECONDS = 10.0
DAY_MS = 86_400_000
RETRY_KEPT_MS = 48 * DAY_MS
"""Longer than the longest wait for a retry, which is 40 days."""
RECORD_BYTES = 4 << 20
"""The size of the largest message, with all headers that a retry adds."""


class Topics:
    """The topics of one consumer. The calls block."""

    def __init__(self, plan: Plan, consumer: Consumer, cluster: Cluster) -> None:
        self._plan = plan
        self._consumer = consumer
        self._cluster = cluster
        self._partitions = cluster.partitions
        self._patterns = [
            re.compile(".*".join(re.escape(part) for part in name.split("*"))) for name in plan.handlers if "*" in name
        ]
        self._named = [name for name in plan.handlers if "*" not in name]
        self._own: list[str] = []
        self._last: dict[str, int] | None = None
        self._missed: set[str] = set()
        """Topics that were missing at the last look. A broker that has just started may not know all topics."""
        self.lacks: list[str] = []
        """Topics that this consumer needs and that were missing at two looks, so that they were probably deleted."""
        self._retries = plan.sharing != "broadcast"  # an owner retries in place, but gets redriven letters this way

    def make(self) -> None:
        """Create the topics that are missing.

        Raises InvalidRequest or Forbidden if the brokers refuse, Unavailable, KafkaException.
        """
        group = self._plan.group
        messages = {"max.message.bytes": str(LARGEST_RECORD)}
        letters = {name for name in self._named if name.startswith(groups.DEAD_LETTER)}
        letters.add(groups.dead_letter_topic(group))
        topics = [_made(name, self._partitions, messages) for name in self._named if name not in letters]
        topics += [_made(name, -1, {"retention.ms": "-1", "retention.bytes": "-1"}) for name in sorted(letters)]
        topics.append(_made(control.TOPIC, 1, COMPACTED))
        if self._retries:
            config = {"retention.ms": str(RETRY_KEPT_MS), "retention.bytes": "-1"}
            topics.append(_made(groups.retry_topic(group), groups.RETRY_PARTITIONS, config))
        if self._plan.sharing == "owner":
            topics.append(_made(groups.owner_topic(group), 1, {}))
        for name in make_missing(self._cluster, topics, tells_changed=True):
            self._see(name)
        self._own = [topic.topic for topic in topics]
        if self._retries:
            self._check_partitions(groups.retry_topic(group))

    def _check_partitions(self, retries: str) -> None:
        """Raises InvalidRequest if the retry topic has too few partitions for long waits: another program made it."""
        topic = self._consumer.list_topics(retries, timeout=CALL_SECONDS).topics[retries]
        if topic.error is None and len(topic.partitions) < groups.RETRY_PARTITIONS:
            raise InvalidRequest(
                f"topic {retries!r} has {len(topic.partitions)} partitions; retries need {groups.RETRY_PARTITIONS}: "
                f"kafka-topics.sh --alter --topic {retries} --partitions {groups.RETRY_PARTITIONS}"
            )

    def _see(self, name: str) -> None:
        """Check that this user can see a topic that was missing and exists now. Raises Forbidden, KafkaException."""
        error = self._consumer.list_topics(name, timeout=CALL_SECONDS).topics[name].error
        if error is not None and error.code() in REFUSED:
            raise refusal(error, self._cluster, self._plan.group)

    def subscribed(self) -> dict[str, int]:
        """The topics to read, including retry topics, with their numbers of partitions.

        A missing topic counts as gone only if it is missing at the next look too. Raises KafkaException, also if a
        broker does not list a topic at the first look that was just created.
        """
        listed = self._consumer.list_topics(timeout=CALL_SECONDS).topics
        missing = [name for name in self._own if name not in listed]
        if missing and self._last is None:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"a broker does not list {missing[0]!r}"))
        present = self._of(listed)
        last = self._last or {}
        vanished = last.keys() - present.keys()
        not_yet_gone = {name: last[name] for name in vanished - self._missed}
        self.lacks = [name for name in missing if name in self._missed]
        self._missed = {*missing, *vanished}
        self._last = dict(sorted((present | not_yet_gone).items()))
        return self._last

    def _of(self, listed: Mapping[str, TopicMetadata]) -> dict[str, int]:
        """The topics to read among the listed ones, with their numbers of partitions."""
        names = set(self._named)
        if self._patterns:
            plain = [name for name in listed if not name.startswith((*groups.OWN_TOPICS, "__"))]
            names |= {name for name in plain if any(pattern.fullmatch(name) for pattern in self._patterns)}
        if self._retries:
            names.add(groups.retry_topic(self._plan.group))
        return {name: len(listed[name].partitions) for name in names if name in listed}


def _made(name: str, partitions: int, config: dict[str, str]) -> NewTopic:
    return new_topic(name, partitions, {"max.message.bytes": str(RECORD_BYTES), **KEPT, **config})
