"""The partitions that a releaser reads, and the partitions that wait until their first record may move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from notify.movers.sinks.delays.wheels import Place

HELD_BYTES = 16 << 10
"""The largest first record that is kept in memory while its partition waits, so that it is not read again."""


class _Waiting(NamedTuple):
    """The end of a partition's wait (microseconds since 1970), its first record's offset, and that record if kept."""

    until_us: int
    offset: int
    record: Any


class Slots:
    """The partitions of one consumer. A waiting partition is paused, and only a small first record of it is kept."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._waiting: dict[Place, _Waiting] = {}

    def waits(self, place: Place) -> bool:
        """Whether a partition waits: then the records that still arrive were read ahead, and will be read again."""
        return place in self._waiting

    def wait(self, place: Place, record: Any, size: int, until_us: int) -> None:
        """Pause a partition until a time (microseconds since 1970), for its record of `size` bytes."""
        offset = record.offset()
        self._waiting[place] = _Waiting(until_us, offset, record if size <= HELD_BYTES else None)
        self._consumer.pause([TopicPartition(*place)])
        self._consumer.seek(TopicPartition(*place, offset))

    def wake(self, now_us: int) -> list[Any]:
        """Resume the partitions whose wait is over; the records that were kept."""
        awake = {place: waiting for place, waiting in self._waiting.items() if waiting.until_us <= now_us}
        for place, waiting in awake.items():
            if waiting.record is not None:
                self._consumer.seek(TopicPartition(*place, waiting.offset + 1))
        self.forget(awake)
        if awake:
            self._consumer.resume([TopicPartition(*place) for place in awake])
        return [waiting.record for waiting in awake.values() if waiting.record is not None]

    def rewind(self, firsts: dict[Place, int]) -> None:
        """Read partitions again, each from its offset on."""
        self.forget(firsts)
        for place, offset in firsts.items():
            with contextlib.suppress(KafkaException):  # the partition may belong to another member by now
                self._consumer.seek(TopicPartition(*place, offset))
                self._consumer.resume([TopicPartition(*place)])

    def forget(self, places: Iterable[Place]) -> None:
        """End the wait of partitions without resuming them."""
        for place in places:
            self._waiting.pop(place, None)

    def next_us(self) -> int | None:
        """When the first wait ends, in microseconds since 1970; None if no partition waits."""
        return min((waiting.until_us for waiting in self._waiting.values()), default=None)
