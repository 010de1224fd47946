"""A compacted topic of one partition, read on from where the last reading ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from notify.errors import Unavailable
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, passes
from notify.server.groups.kafka.brokers import Brokers

POLL_SECONDS = 0.2


class CompactedTopic:
    """Gives each committed record once. One thread at a time."""

    def __init__(self, brokers: Brokers, topic: str, forget: Callable[[], object]) -> None:
        """`forget`: called where the topic was deleted or made anew, so that its earlier records do not count."""
        self._brokers = brokers
        self._partition = TopicPartition(topic, 0, OFFSET_BEGINNING)
        self._forget = forget
        self._consumer: Consumer | None = None
        self._read_to = 0
        """The offset behind everything that was read, a transaction's own records too."""

    def news(self) -> Iterator[tuple[str, bytes | None, int]]:
        """Key, value and time (microseconds since 1970) of each record since the last time, up to the present end.

        None where there is no such topic. Raises KafkaException, TimeoutError, Unavailable.
        """
        place = (self._partition.topic, self._partition.partition)
        end = offsets.latest(self._brokers.admin, [place]).get(place, 0)
        if end < self._read_to:
            self._begin_anew()
        deadline = time.monotonic() + CALL_SECONDS
        while self._read_to < end:
            if time.monotonic() > deadline:
                raise Unavailable(f"Kafka does not give topic {self._partition.topic!r} within {CALL_SECONDS:g} s")
            record = self._opened().poll(POLL_SECONDS)
            if record is None:
                continue
            error = record.error()
            if error is None:
                self._read_to = (record.offset() or 0) + 1
                key = (record.key() or b"").decode("utf-8", "replace")
                yield key, record.value(), record.timestamp()[1] * 1000
            elif error.code() == KafkaError._PARTITION_EOF:
                self._read_to = max(self._read_to, record.offset() or 0)
            elif not passes(error):
                raise KafkaException(error)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _begin_anew(self) -> None:
        self.close()
        self._read_to = 0
        self._forget()

    def _opened(self) -> Consumer:
        if self._consumer is None:
            consumer = self._brokers.cluster.consumer({"group.id": "notify-readers", "enable.partition.eof": True})
            consumer.assign([self._partition])
            self._consumer = consumer
        return self._consumer
