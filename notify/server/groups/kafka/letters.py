"""Dead letters in Kafka: the records of `dead-letter.{group}`, and which of them were sent to their group again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from notify.errors import Unavailable
from notify.kafka import records
from notify.kafka.groups import dead_letter_topic
from notify.kafka.reading import arrived, reader
from notify.kafka.records import Headers
from notify.kafka.redriven import Spot, letter_id
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, passes
from notify.server.groups.kafka.brokers import READERS, Brokers
from notify.wire import Payload, body_fields, instant

AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """One record of a dead-letter topic."""

    partition: int
    offset: int
    number: int
    """The place in the list: it rises from letter to letter, also where the topic has several partitions."""
    dead_us: int
    headers: Headers
    key: bytes | None
    value: bytes

    @property
    def id(self) -> str:
        return letter_id(records.header(self.headers, records.ID), Spot(self.partition, self.offset))

    @property
    def topic(self) -> str:
        """The topic whose message it was."""
        return records.header(self.headers, records.TARGET) or ""

    def payload(self) -> Payload:
        """The message as filters and people see it, with the reason in its headers as in the server's own queues."""
        headers = records.own_headers(self.headers) | records.why_dead(self.headers)
        key = None if self.key is None else self.key.decode("utf-8", "replace")
        return Payload(self.topic, self.value, key, records.header(self.headers, records.TAG), headers)

    def shown(self, *, redriven: bool) -> dict[str, Any]:
        payload = self.payload()
        fields = {
            "id": self.id,
            "queue": self.partition,
            "offset": self.number,
            "topic": payload.topic,
            "key": payload.key,
            "tag": payload.tag,
            "headers": payload.headers,
            "dead_at": instant(self.dead_us),
            "redriven": redriven,
        }
        return {name: value for name, value in fields.items() if value is not None} | body_fields(self.value)


def read(brokers: Brokers, group: str, partitions: int, number: int = 0) -> Iterator[Letter]:
    """The letters of a group from a number on, to the present end, in the order of their partitions' offsets.

    `partitions`: how many its dead-letter topic has. Raises KafkaException, Unavailable.
    """
    topic, places = dead_letter_topic(group), _places(group, partitions)
    ends = {p: end for (_, p), end in offsets.whole(offsets.latest(brokers.admin, places), places).items()}
    waiting = {}
    for (_, partition), start in offsets.whole(offsets.earliest(brokers.admin, places), places).items():
        first = max(start, -(-(number - partition) // partitions))
        if first < ends[partition]:
            waiting[partition] = first
    if not waiting:
        return
    consumer = reader(brokers.cluster, READERS)
    try:
        consumer.assign([TopicPartition(topic, p, first) for p, first in waiting.items()])
        yield from _in_order(_Reading(consumer, waiting, ends), partitions)
    finally:
        consumer.close()


def numbers(bounds: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """The number of the first letter that there may be in partitions with these bounds, and that behind the last."""
    count = len(bounds)
    held = {partition: bound for partition, bound in bounds.items() if bound[0] < bound[1]}
    return (
        min((start * count + partition for partition, (start, _) in held.items()), default=0),
        max(((end - 1) * count + partition + 1 for partition, (_, end) in held.items()), default=0),
    )


def _places(group: str, partitions: int) -> list[offsets.Place]:
    return [(dead_letter_topic(group), partition) for partition in range(partitions)]


class _Reading:
    """Partitions that are read to their ends."""

    def __init__(self, consumer: Any, waiting: dict[int, int], ends: dict[int, int]) -> None:
        self._consumer = consumer
        self.waiting = waiting
        """The next offset of each partition that has not come to its end."""
        self._ends = ends

    def more(self) -> Iterator[Message]:
        """Some records. Raises Unavailable where none comes."""
        deadline = time.monotonic() + CALL_SECONDS
        while self.waiting:
            for record in arrived(self._consumer, AT_ONCE, 0.5):
                error = record.error()
                partition, offset = record.partition() or 0, record.offset() or 0
                if error is None:
                    self._pass(partition, offset + 1)
                    if offset < self._ends[partition]:
                        yield record
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._pass(partition, offset)
                elif passes(error):
                    continue
                else:
                    raise KafkaException(error)
                deadline = time.monotonic() + CALL_SECONDS
            if time.monotonic() > deadline:
                raise Unavailable(f"Kafka gave no dead letter for {CALL_SECONDS:g} s")

    def _pass(self, partition: int, offset: int) -> None:
        if offset >= self._ends[partition]:
            self.waiting.pop(partition, None)
        elif partition in self.waiting:
            self.waiting[partition] = offset


def _in_order(reading: _Reading, partitions: int) -> Iterator[Letter]:
    """Letters by their numbers. One is held back until every other partition has been read as far."""
    held: list[Letter] = []
    for record in reading.more():
        held.append(_letter(record, partitions))
        if len(held) >= AT_ONCE:
            held.sort(key=lambda letter: letter.number)
            read_to = min((offset * partitions for offset in reading.waiting.values()), default=held[-1].number + 1)
            ready = [letter for letter in held if letter.number < read_to]
            held = held[len(ready) :]
            yield from ready
    yield from sorted(held, key=lambda letter: letter.number)


def _letter(record: Message, partitions: int) -> Letter:
    partition, offset = record.partition() or 0, record.offset() or 0
    return Letter(
        partition,
        offset,
        offset * partitions + partition,
        record.timestamp()[1] * 1000,
        records.listed(record),
        record.key(),
        record.value() or b"",
    )
