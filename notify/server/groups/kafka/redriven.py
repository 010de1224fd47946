"""Sending dead letters in Kafka to their group again, each once however often it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from notify.kafka import records
from notify.kafka.brokers import make_topics
from notify.kafka.groups import retry_topic
from notify.kafka.records import Headers
from notify.server.groups.kafka.answers import CALL_SECONDS
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopic
from notify.server.groups.kafka.letters import Letter
from notify.storage.runs import OffsetRuns

TOPIC = "notify-redriven"
"""A compacted topic: one record for each letter that was sent again, written in one transaction with it."""
_NEW = (records.ATTEMPT, records.DUE, records.REASON, records.EXPIRES)
"""Headers of a letter that its message does not keep: it has all its attempts again, and its time to live is over."""


class Redriven:
    """The letters that were sent again. One thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._numbers: dict[str, OffsetRuns] = {}
        self._topic = CompactedTopic(brokers, TOPIC, self._numbers.clear)

    def read(self) -> Mapping[str, OffsetRuns]:
        """The numbers of the letters that were sent again, by group. Raises KafkaException, Unavailable."""
        for key, _, _ in self._topic.news():
            name, _, number = key.rpartition("/")
            self._numbers.setdefault(name, OffsetRuns()).add(int(number), 1)
        return self._numbers

    def of_group(self, group: str) -> OffsetRuns:
        """As `read`, of one group."""
        return self.read().get(group, OffsetRuns())

    def send(self, group: str, letters: Sequence[Letter]) -> list[int]:
        """Send letters to their group's retry topic; a status for each: 201, or 200 if it was sent before.

        Raises KafkaException, Unavailable: then none was sent.
        """
        make_topics(self._brokers.cluster, [TOPIC], compacted=True)
        producer = self._brokers.cluster.producer({"transactional.id": f"notify-redrive-{group}"})
        producer.init_transactions(CALL_SECONDS)  # from here on another server's redrive cannot be committed
        sent_before = self.of_group(group)
        statuses = [200 if letter.number in sent_before else 201 for letter in letters]
        if 201 not in statuses:
            return statuses
        due = str(time.time_ns() // 1000).encode()
        producer.begin_transaction()
        for letter, status in zip(letters, statuses, strict=True):
            if status == 201:
                producer.produce(
                    retry_topic(group), letter.value, letter.key, partition=0, headers=_headers(letter, due)
                )
                producer.produce(TOPIC, b"", f"{group}/{letter.number}".encode(), partition=0)
        producer.commit_transaction(CALL_SECONDS)
        return statuses

    def close(self) -> None:
        self._topic.close()


def _headers(letter: Letter, due: bytes) -> Headers:
    kept = [header for header in letter.headers if header[0] not in _NEW]
    return [*kept, (records.ATTEMPT, b"1"), (records.DUE, due)]
