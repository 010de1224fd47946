"""The topics of a consumer over Kafka: those it makes, and those that its names and patterns stand for."""

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
"""A message that failed waits at most 40 days."""
RECORD_BYTES = 4 << 20
"""A message of the most bytes, with all that a retry adds to its headers."""


class Topics:
    """The calls block."""

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
        """Topics that were not there at the last look. A broker that has just started may not know all."""
        self.lacks: list[str] = []
        """Topics that this consumer needs, and that were not there at two looks: somebody may have deleted them."""
        self._retries = plan.sharing != "broadcast"  # an owner retries in place, and gets redriven letters this way

    def make(self) -> None:
        """Make topics that are missing.

        Raises InvalidRequest or Forbidden where the brokers refuse, Unavailable, KafkaException.
        """
        group = self._plan.group
        messages = {"max.message.bytes": str(LARGEST_RECORD)}
        letters = {name for name in self._named if name.startswith(groups.DEAD_LETTER)}
        letters.add(groups.dead_letter_topic(group))
        wanted = [_made(name, self._partitions, messages) for name in self._named if name not in letters]
        wanted += [_made(name, -1, {"retention.ms": "-1", "retention.bytes": "-1"}) for name in sorted(letters)]
        wanted.append(_made(control.TOPIC, 1, COMPACTED))
        if self._retries:
            kept = {"retention.ms": str(RETRY_KEPT_MS), "retention.bytes": "-1"}
            wanted.append(_made(groups.retry_topic(group), groups.RETRY_PARTITIONS, kept))
        if self._plan.sharing == "owner":
            wanted.append(_made(groups.owner_topic(group), 1, {}))
        for name in make_missing(self._cluster, wanted):
            self._see(name)
        self._own = [topic.topic for topic in wanted]
        if self._retries:
            self._check_partitions(groups.retry_topic(group))

    def _check_partitions(self, retries: str) -> None:
        """A retry topic that somebody else made may have too few: no message could wait for long."""
        known = self._consumer.list_topics(retries, timeout=CALL_SECONDS).topics[retries]
        if known.error is None and len(known.partitions) < groups.RETRY_PARTITIONS:
            raise InvalidRequest(
                f"topic {retries!r} has {len(known.partitions)} partitions; retries need {groups.RETRY_PARTITIONS}: "
                f"kafka-topics.sh --alter --topic {retries} --partitions {groups.RETRY_PARTITIONS}"
            )

    def _see(self, name: str) -> None:
        """A topic that was missing, and exists: raises Forbidden where this user may not see it, KafkaException."""
        error = self._consumer.list_topics(name, timeout=CALL_SECONDS).topics[name].error
        if error is not None and error.code() in REFUSED:
            raise refusal(error, self._cluster, self._plan.group)

    def subscribed(self) -> dict[str, int]:
        """The topics to read, by name and pattern and with those of retries, and how many partitions each has now.

        One that is missing is gone if it is missing the next time, too. Raises KafkaException, also where a broker does
        not list at the first look what was just made.
        """
        known = self._consumer.list_topics(timeout=CALL_SECONDS).topics
        missing = [name for name in self._own if name not in known]
        if missing and self._last is None:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"a broker does not list {missing[0]!r}"))
        present = self._of(known)
        before = self._last or {}
        vanished = before.keys() - present.keys()
        kept = {name: before[name] for name in vanished - self._missed}
        self.lacks = [name for name in missing if name in self._missed]
        self._missed = {*missing, *vanished}
        self._last = dict(sorted((present | kept).items()))
        return self._last

    def _of(self, known: Mapping[str, TopicMetadata]) -> dict[str, int]:
        """Those of the topics that are to be read, and how many partitions each has."""
        names = set(self._named)
        if self._patterns:
            plain = [name for name in known if not name.startswith((*groups.OWN_TOPICS, "__"))]
            names |= {name for name in plain if any(pattern.fullmatch(name) for pattern in self._patterns)}
        if self._retries:
            names.add(groups.retry_topic(self._plan.group))
            names |= known.keys() & set(groups.old_retry_topics(self._plan.group))
        return {name: len(known[name].partitions) for name in names if name in known}


def _made(name: str, partitions: int, config: dict[str, str]) -> NewTopic:
    return new_topic(name, partitions, {"max.message.bytes": str(RECORD_BYTES), **KEPT, **config})
