"""Kafka in an exploration: what it has of a run's messages, and what the service's groups have not settled."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.errors import Timeout
from notify.kafka.cluster import Cluster
from notify.kafka.groups import dead_letter_topic, retry_topic
from notify.kafka.records import ID, header, listed

CALL_SECONDS = 10.0
POLL_SECONDS = 0.5
SILENT_SECONDS = 30.0
"""How long Kafka may give no record while partitions are read."""
Place = tuple[str, int]
"""A topic and a partition."""


class ExploredKafka:
    """The topics and groups of the service under test, which stay from run to run. Each run begins behind the records
    of the one before."""

    def __init__(self, url: str) -> None:
        self._cluster = Cluster.of(url)
        self._reader = self._cluster.consumer({"group.id": "notify-explorer", "enable.partition.eof": True})
        self._members: dict[str, Any] = {}
        """Clients that ask for the groups' progress, and are no members themselves."""
        self._begins: dict[Place, int] = {}
        """The offsets at which this run's records begin."""
        self._letters_before = 0

    def begin(self, groups: Iterable[str], topics: Iterable[str]) -> None:
        """A run begins."""
        self._begins = {place: self._ends(place)[1] for place in self._places(topics)}
        self._letters_before = self._letters(groups)

    def unsettled(self, groups: Iterable[str], topics: Iterable[str]) -> int:
        """How many records of these topics the groups have not settled, and of what waits for another attempt."""
        return sum(self._lag(group, [*topics, retry_topic(group)]) for group in groups)

    def dead_letters(self, groups: Iterable[str]) -> int:
        """How many dead letters this run has made."""
        return self._letters(groups) - self._letters_before

    def messages(self, topics: Iterable[str]) -> Counter[str]:
        """The ids of this run's messages. Raises Timeout if Kafka gives nothing for SILENT_SECONDS."""
        places = self._places(topics)
        found: Counter[str] = Counter()
        self._reader.assign([TopicPartition(*place, self._begins.get(place, 0)) for place in places])
        left = set(places)
        until = time.monotonic() + SILENT_SECONDS
        while left:
            record = self._reader.poll(POLL_SECONDS)
            if record is None:
                if time.monotonic() > until:
                    some = ", ".join(f"{topic}[{number}]" for topic, number in sorted(left)[:5])
                    raise Timeout(
                        f"Kafka gave nothing for {SILENT_SECONDS:g} s, and {len(left)} partitions are not read to "
                        f"their end ({some}): look whether its brokers run"
                    )
                continue
            until = time.monotonic() + SILENT_SECONDS
            error = record.error()
            if error is None:
                found[header(listed(record), ID) or ""] += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard((record.topic(), record.partition()))
            else:
                raise KafkaException(error)
        self._reader.unassign()
        return found

    def close(self) -> None:
        for client in (self._reader, *self._members.values()):
            client.close()

    def _lag(self, group: str, topics: Iterable[str]) -> int:
        member = self._members.get(group)
        if member is None:
            member = self._members[group] = self._cluster.consumer({"group.id": group})
        lag = 0
        partitions = [TopicPartition(*place) for place in self._places(topics)]
        for committed in member.committed(partitions, timeout=CALL_SECONDS) if partitions else ():
            first, end = self._ends((committed.topic, committed.partition))
            lag += max(0, end - max(first, committed.offset))  # an offset below 0: nothing is committed
        return lag

    def _letters(self, groups: Iterable[str]) -> int:
        return sum(self._ends(place)[1] for place in self._places(map(dead_letter_topic, groups)))

    def _places(self, topics: Iterable[str]) -> list[Place]:
        """The partitions of those topics that there are."""
        known = self._reader.list_topics(timeout=CALL_SECONDS).topics
        return [(topic, number) for topic in topics if topic in known for number in known[topic].partitions]

    def _ends(self, place: Place) -> tuple[int, int]:
        """The offsets of the first record, and behind the last one."""
        first, end = self._reader.get_watermark_offsets(TopicPartition(*place), timeout=CALL_SECONDS)
        return first, end
