"""The partitions that a releaser reads, and those that wait for their first record to be movable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from notify.sinks.delays.wheels import Place

HELD_BYTES = 16 << 10
"""A first record of at most so many bytes is held while its partition waits: it goes without being read again."""


class _Waiting(NamedTuple):
    """Until when a partition waits, in microseconds since 1970, for which record, and that record if it is held."""

    until_us: int
    offset: int
    record: Any


class Slots:
    """One consumer's partitions. One that waits is paused, and nothing of it is held but a small first record."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._waiting: dict[Place, _Waiting] = {}

    def waits(self, place: Place) -> bool:
        """Whether a partition waits: records of it that still come were read ahead, and will come again."""
        return place in self._waiting

    def wait(self, place: Place, record: Any, size: int, until_us: int) -> None:
        """Have a partition wait until that time (microseconds since 1970), for a record of so many bytes."""
        offset = record.offset()
        self._waiting[place] = _Waiting(until_us, offset, record if size <= HELD_BYTES else None)
        self._consumer.pause([TopicPartition(*place)])
        self._consumer.seek(TopicPartition(*place, offset))

    def wake(self, now_us: int) -> list[Any]:
        """Read on where the time has come; the records that were held there."""
        awake = {place: w for place, w in self._waiting.items() if w.until_us <= now_us}
        for place, waiting in awake.items():
            if waiting.record is not None:
                self._consumer.seek(TopicPartition(*place, waiting.offset + 1))
        self.forget(awake)
        if awake:
            self._consumer.resume([TopicPartition(*place) for place in awake])
        return [waiting.record for waiting in awake.values() if waiting.record is not None]

    def rewind(self, firsts: dict[Place, int]) -> None:
        """Read these partitions again from these offsets on."""
        self.forget(firsts)
        for place, offset in firsts.items():
            with contextlib.suppress(KafkaException):  # the partition may be another's by now
                self._consumer.seek(TopicPartition(*place, offset))
                self._consumer.resume([TopicPartition(*place)])

    def forget(self, places: Iterable[Place]) -> None:
        """These partitions no longer wait."""
        for place in places:
            self._waiting.pop(place, None)

    def next_us(self) -> int | None:
        """When the first one wakes, in microseconds since 1970."""
        return min((waiting.until_us for waiting in self._waiting.values()), default=None)
