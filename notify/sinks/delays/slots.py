"""The partitions that a releaser reads, and those that wait for their first record to be movable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from confluent_kafka import Consumer, KafkaException, TopicPartition

from notify.sinks.delays.wheels import Place


class Slots:
    """One consumer's partitions. A partition that waits is paused, and nothing of it is held."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._wakes_us: dict[Place, int] = {}

    def waits(self, place: Place) -> bool:
        """Whether a partition waits: records of it that still come were read ahead, and will come again."""
        return place in self._wakes_us

    def wait(self, place: Place, offset: int, until_us: int) -> None:
        """Read a partition again from this offset on, at that time (microseconds since 1970)."""
        self._wakes_us[place] = until_us
        self._consumer.pause([TopicPartition(*place)])
        self._consumer.seek(TopicPartition(*place, offset))

    def wake(self, now_us: int) -> None:
        """Read on where the time has come."""
        awake = [place for place, at_us in self._wakes_us.items() if at_us <= now_us]
        self.forget(awake)
        if awake:
            self._consumer.resume([TopicPartition(*place) for place in awake])

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
            self._wakes_us.pop(place, None)

    def next_us(self) -> int | None:
        """When the first one wakes, in microseconds since 1970."""
        return min(self._wakes_us.values(), default=None)
