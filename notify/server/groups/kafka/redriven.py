"""Redrives dead letters in Kafka to their group, or drops them: each once, however often it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from notify.kafka import records
from notify.kafka.groups import retry_topic
from notify.kafka.records import Headers
from notify.kafka.redriven import DROPPED, REDRIVEN, Spot
from notify.kafka.table import PARTITION
from notify.kafka.topic_ids import topic_ids
from notify.server.groups.kafka.answers import CALL_SECONDS
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics, row_of
from notify.server.groups.kafka.letters import KafkaLetter

_NEW = (records.ATTEMPT, records.DUE, records.REASON, records.EXPIRES)
"""Headers of a letter that its redriven message does not get: it has all its attempts again, and does not expire."""
TABLES = {table.topic: table for table in (REDRIVEN, DROPPED)}
Notes = Mapping[Spot, str]
"""The message ids of one group's letters that were redriven, or that were dropped, by the letter's place."""


class Redriven:
    """The letters that were redriven, and those that were dropped. Used by one thread at a time."""

    def __init__(self, brokers: Brokers, seconds: float = CALL_SECONDS) -> None:
        """`seconds`: how long a redrive waits for another group's redrive to end, which hides later notes."""
        self._brokers = brokers
        self._by_group: dict[str, dict[str, dict[Spot, str]]] = {table.topic: {} for table in TABLES.values()}
        """The notes by their topic, then by group."""
        self._topic = CompactedTopics(brokers, lambda topic: self._by_group[topic].clear(), seconds=seconds)

    def read(self) -> None:
        """Read new notes from the topics that have a leader. Raises KafkaException, Unavailable."""
        self._take(list(TABLES), whole=False)

    def sent(self, group: str) -> Notes:
        """The letters of a group that were redriven, by the notes read last."""
        return self._by_group[REDRIVEN.topic].get(group, {})

    def dropped(self, group: str) -> Notes:
        """The letters of a group that were dropped, by the notes read last."""
        return self._by_group[DROPPED.topic].get(group, {})

    def noted(self, group: str, spot: Spot) -> list[str]:
        """The ids of letters of a group that were redriven or dropped at this place, by the notes read last."""
        return [notes[spot] for notes in (self.sent(group), self.dropped(group)) if spot in notes]

    def _read_whole(self) -> None:
        """Read all notes: no letter may be sent that was redriven or dropped before.

        All groups share the topics. Another group's transaction that is open there hides the notes behind it.
        """
        self._take(list(topic_ids(self._brokers.admin, list(TABLES), CALL_SECONDS)), whole=True)

    def _take(self, topics: Sequence[str], *, whole: bool) -> None:
        for record in self._topic.news(topics, whole=whole):
            row = row_of(TABLES[record.topic], record)
            if row is not None:
                (group, spot), note = row
                self._by_group[record.topic].setdefault(group, {})[spot] = note.partition("\n")[0]

    def send(self, group: str, letters: Sequence[KafkaLetter]) -> list[int]:
        """Redrive letters to their group's retry topic; a status for each: 201, 200 if redriven before, 410 if dropped.

        Raises KafkaException, Unavailable: then either none or all were sent.
        """
        REDRIVEN.make(self._brokers.cluster)
        with self._brokers.transaction(f"notify-redrive-{group}") as producer:
            self._read_whole()
            sent, dropped = self.sent(group), self.dropped(group)
            statuses = [200 if has(sent, letter) else 410 if has(dropped, letter) else 201 for letter in letters]
            producer.begin_transaction()
            due = str(time.time_ns() // 1000).encode()
            for letter, status in zip(letters, statuses, strict=True):
                if status == 201:
                    producer.produce(
                        retry_topic(group), letter.value, letter.key, partition=0, headers=_headers(letter, due)
                    )
                    key, value = REDRIVEN.record((group, letter.spot), letter.id)
                    producer.produce(REDRIVEN.topic, value, key, PARTITION)
        return statuses

    def drop(self, group: str, letters: Sequence[KafkaLetter], why: str) -> list[int]:
        """Drop letters; a status for each: 204, or 200 if it was redriven or dropped before.

        A redrive has the same transactional id, so that they exclude each other. Raises KafkaException, Unavailable.
        """
        for table in TABLES.values():
            table.make(self._brokers.cluster)
        with self._brokers.transaction(f"notify-redrive-{group}") as producer:
            self._read_whole()
            sent, dropped = self.sent(group), self.dropped(group)
            statuses = [200 if has(sent, letter) or has(dropped, letter) else 204 for letter in letters]
            producer.begin_transaction()
            for letter, status in zip(letters, statuses, strict=True):
                if status == 204:
                    key, value = DROPPED.record((group, letter.spot), f"{letter.id}\n{why[:500]}")
                    producer.produce(DROPPED.topic, value, key, PARTITION)
        return statuses

    def close(self) -> None:
        self._topic.close()


def has(notes: Notes, letter: KafkaLetter) -> bool:
    """Whether the notes have this letter."""
    return notes.get(letter.spot) == letter.id


def _headers(letter: KafkaLetter, due: bytes) -> Headers:
    kept = [header for header in letter.headers if header[0] not in _NEW]
    return [*kept, (records.ATTEMPT, b"1"), (records.DUE, due)]
