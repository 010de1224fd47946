"""The time of the oldest message that a group has not handled: the record at its position."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from notify.kafka.codes import GONE
from notify.kafka.table import arrived, reader
from notify.server.groups.kafka.answers import passes
from notify.server.groups.kafka.brokers import READERS, Brokers
from notify.server.groups.kafka.offsets import Place
from notify.server.groups.kafka.snapshot import KafkaGroup

NO_RECORD = GONE | {KafkaError._PARTITION_EOF, KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""Errors after which the age is unknown: there is no record yet, or this user may not read the topic."""
AT_ONCE = 128
"""The most partitions of which one look reads a record."""
LOOK_SECONDS = 0.5
POLL_SECONDS = 0.1


class Oldest:
    """The times of records at groups' positions, each read once. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._consumer: Consumer | None = None
        self._times_us: dict[tuple[Place, int], int] = {}
        """The time of the record by (partition, offset)."""
        self._looks = 0
        self._looked: dict[tuple[Place, int], int] = {}
        """The number of the last look at each wanted position whose record is not known."""

    def of(self, groups: Iterable[KafkaGroup]) -> dict[str, int]:
        """The times by group, in microseconds since 1970; groups whose records are not read yet are left out.

        Raises KafkaException.
        """
        waiting = {
            group.name: [((p.topic, p.partition), p.progress.offset, p.end) for p in group.positions if p.lag]
            for group in groups
        }
        wanted = {(place, offset): end for rows in waiting.values() for place, offset, end in rows}
        self._times_us = {at: time_us for at, time_us in self._times_us.items() if at in wanted}
        unread = self._next(wanted)
        if unread:
            self._read(unread)
        times = {
            name: [t for place, offset, _ in rows if (t := self._times_us.get((place, offset))) is not None]
            for name, rows in waiting.items()
        }
        return {name: min(known) for name, known in times.items() if known}

    def _next(self, wanted: Collection[tuple[Place, int]]) -> list[tuple[Place, int]]:
        """The positions that this look reads, those of the longest ago first.

        A position without a record is read again, because one may have come, but only after the others.
        """
        unread = [at for at in wanted if at not in self._times_us]
        chosen = sorted(unread, key=lambda at: self._looked.get(at, 0))[:AT_ONCE]
        self._looks += 1
        before = {at: self._looked[at] for at in unread if at in self._looked}
        self._looked = before | dict.fromkeys(chosen, self._looks)
        return chosen

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _read(self, wanted: list[tuple[Place, int]]) -> None:
        if self._consumer is None:
            self._consumer = reader(self._brokers.cluster, READERS, {"fetch.message.max.bytes": 4096})
        at = dict(wanted)  # one position a partition; the next look reads another group's
        self._consumer.assign([TopicPartition(*place, offset) for place, offset in at.items()])
        deadline = time.monotonic() + LOOK_SECONDS
        while at and time.monotonic() < deadline:
            for record in arrived(self._consumer, AT_ONCE, POLL_SECONDS):
                error, place = record.error(), (record.topic() or "", record.partition() or 0)
                if error is None and place in at:
                    self._times_us[place, at.pop(place)] = record.timestamp()[1] * 1000
                elif error is not None and (error.code() in NO_RECORD):
                    at.pop(place, None)
                elif error is not None and not passes(error):
                    raise KafkaException(error)
        self._consumer.unassign()
