"""Sending dead letters in Kafka to their group again, each once however often it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from notify.kafka import records
from notify.kafka.brokers import make_topics
from notify.kafka.groups import retry_topic
from notify.kafka.records import Headers
from notify.kafka.redriven import TOPIC, Spot, parsed
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics
from notify.server.groups.kafka.letters import Letter

_NEW = (records.ATTEMPT, records.DUE, records.REASON, records.EXPIRES)
"""Headers of a letter that its message does not keep: it has all its attempts again, and its time to live is over."""


class Redriven:
    """The letters that were sent again. One thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._by_group: dict[str, dict[Spot, str]] = {}
        self._topic = CompactedTopics(brokers, lambda _: self._by_group.clear())

    def read(self, *, whole: bool = False) -> Mapping[str, Mapping[Spot, str]]:
        """The message ids of letters that were sent again, by group and spot.

        Without `whole` as they were known last, if the topic has no leader. Raises KafkaException, Unavailable.
        """
        for record in self._topic.news([TOPIC], whole=whole):
            note = parsed(record.key)
            if note is not None:  # else another tool's
                group, spot = note
                self._by_group.setdefault(group, {})[spot] = (record.value or b"").decode("utf-8", "replace")
        return self._by_group

    def of_group(self, group: str) -> Mapping[Spot, str]:
        """As `read`, of one group."""
        return self.read().get(group, {})

    def send(self, group: str, letters: Sequence[Letter]) -> list[int]:
        """Send letters to their group's retry topic; a status for each: 201, or 200 if it was sent before.

        Raises KafkaException, Unavailable: then none was sent, or all were.
        """
        make_topics(self._brokers.cluster, [TOPIC], compacted=True)
        with self._brokers.transaction(f"notify-redrive-{group}") as producer:
            sent_before = self.read(whole=True).get(group, {})
            statuses = [200 if is_sent(letter, sent_before) else 201 for letter in letters]
            producer.begin_transaction()
            due = str(time.time_ns() // 1000).encode()
            for letter, status in zip(letters, statuses, strict=True):
                if status == 201:
                    producer.produce(
                        retry_topic(group), letter.value, letter.key, partition=0, headers=_headers(letter, due)
                    )
                    key = letter.spot.key(group)
                    producer.produce(TOPIC, letter.id.encode(), key.encode(), partition=0)
        return statuses

    def close(self) -> None:
        self._topic.close()


def is_sent(letter: Letter, sent: Mapping[Spot, str]) -> bool:
    """Whether a letter is among those that were sent again."""
    return sent.get(letter.spot) == letter.id


def _headers(letter: Letter, due: bytes) -> Headers:
    kept = [header for header in letter.headers if header[0] not in _NEW]
    return [*kept, (records.ATTEMPT, b"1"), (records.DUE, due)]
