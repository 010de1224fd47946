"""Dead letters in Kafka: the records of `dead-letter.{group}`, in one order over all partitions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from notify.errors import Unavailable
from notify.kafka import records
from notify.kafka.groups import dead_letter_topic
from notify.kafka.records import Headers
from notify.kafka.redriven import Spot, letter_id
from notify.kafka.table import arrived, reader
from notify.protocol.wire import Payload, body_fields, instant
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, passes
from notify.server.groups.kafka.brokers import READERS, Brokers
from notify.server.letters.engine import Fate

AT_ONCE = 500
POLL_SECONDS = 0.5
HELD_BYTES = 16 << 20
"""The most bytes of letters of all partitions that are held to order them, plus the letters of one call."""
QUEUED_KILOBYTES = 8 << 10
"""The most that the client fetches ahead, and that one call returns."""


@dataclass(frozen=True, slots=True)
class KafkaLetter:
    """One record of a dead-letter topic."""

    partition: int
    offset: int
    number: int
    """The place in the order of all partitions' letters: it rises from letter to letter."""
    dead_us: int
    headers: Headers
    key: bytes | None
    value: bytes

    @property
    def spot(self) -> Spot:
        return Spot(self.partition, self.offset)

    @property
    def id(self) -> str:
        return letter_id(records.header(self.headers, records.ID), self.spot)

    @property
    def size(self) -> int:
        """An estimate of its bytes in memory."""
        headers = sum(len(name) + len(text or b"") for name, text in self.headers)
        return len(self.value) + len(self.key or b"") + headers + 500

    @property
    def is_damaged(self) -> bool:
        return False

    @property
    def topic(self) -> str:
        """The topic that the message was sent to."""
        return records.header(self.headers, records.TARGET) or ""

    def alone(self) -> KafkaLetter:
        named = [header for header in self.headers if header[0] == records.ID]
        return KafkaLetter(self.partition, self.offset, self.number, self.dead_us, named, None, b"")

    def payload(self) -> Payload:
        """The message for filters and people, with the reason in its headers as in the server's own queues."""
        headers = records.own_headers(self.headers) | records.why_dead(self.headers)
        key = None if self.key is None else self.key.decode("utf-8", "replace")
        return Payload(self.topic, self.value, key, records.header(self.headers, records.TAG), headers)

    def shown(self, fate: Fate) -> dict[str, Any]:
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
            "redriven": fate is Fate.REDRIVEN,
            "dropped": fate is Fate.DROPPED,
        }
        return {name: value for name, value in fields.items() if value is not None} | body_fields(self.value)


def read(brokers: Brokers, group: str, partitions: int, number: int = 0) -> Iterator[KafkaLetter]:
    """The letters of a group from a number on, to the present end, in the order of their numbers.

    `partitions`: the number of partitions of its dead-letter topic. Raises KafkaException, Unavailable.
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
    consumer = reader(brokers.cluster, READERS, {"queued.max.messages.kbytes": QUEUED_KILOBYTES})
    try:
        yield from _Reading(consumer, topic, waiting, ends).letters()
    finally:
        consumer.close()


def numbers(bounds: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """(the first number that a letter in partitions with these bounds may have, the number after the last)."""
    count = len(bounds)
    held = {partition: bound for partition, bound in bounds.items() if bound[0] < bound[1]}
    return (
        min((start * count + partition for partition, (start, _) in held.items()), default=0),
        max(((end - 1) * count + partition + 1 for partition, (_, end) in held.items()), default=0),
    )


def _places(group: str, partitions: int) -> list[offsets.Place]:
    return [(dead_letter_topic(group), partition) for partition in range(partitions)]


class _Reading:
    """Reads partitions to their ends, and yields their letters in the order of their numbers.

    A letter is held until every other partition has been read as far. A partition that is ahead is paused when
    HELD_BYTES are held: letters may have a megabyte each.
    """

    def __init__(self, consumer: Consumer, topic: str, waiting: dict[int, int], ends: dict[int, int]) -> None:
        """`waiting`: the first offset to read in each partition; its end is in `ends`."""
        self._consumer = consumer
        self._topic = topic
        self._waiting = waiting
        """The next offset of each partition that is not read to its end."""
        self._ends = ends
        self._held: dict[int, deque[KafkaLetter]] = {partition: deque() for partition in waiting}
        self._bytes = dict.fromkeys(waiting, 0)
        self._most = HELD_BYTES // len(waiting)
        """The bytes of one partition that may be held before it is paused."""
        self._paused: set[int] = set()
        consumer.assign([TopicPartition(topic, partition, first) for partition, first in waiting.items()])

    def letters(self) -> Iterator[KafkaLetter]:
        """Yield the letters. Raises KafkaException, and Unavailable if no record comes."""
        while True:
            yield from self._ready()
            if not self._waiting:
                return
            self._fetch()

    def _ready(self) -> Iterator[KafkaLetter]:
        """The held letters that no unread letter can precede."""
        while held := [letters[0] for letters in self._held.values() if letters]:
            first = min(held, key=lambda letter: letter.number)
            unknown = [offset * len(self._ends) + p for p, offset in self._waiting.items() if not self._held[p]]
            if any(number < first.number for number in unknown):
                return
            self._held[first.partition].popleft()
            self._bytes[first.partition] -= first.size
            if first.partition in self._paused and self._bytes[first.partition] <= self._most // 2:
                self._paused.discard(first.partition)
                self._consumer.resume([TopicPartition(self._topic, first.partition)])
            yield first

    def _fetch(self) -> None:
        deadline = time.monotonic() + CALL_SECONDS
        while not (came := arrived(self._consumer, AT_ONCE, POLL_SECONDS)):
            if time.monotonic() > deadline:
                raise Unavailable(f"Kafka gave no dead letter for {CALL_SECONDS:g} s")
        for record in came:
            error = record.error()
            partition, offset = record.partition() or 0, record.offset() or 0
            if error is None:
                self._pass(partition, offset + 1)
                if offset < self._ends[partition]:
                    self._hold(_letter(record, len(self._ends)))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._pass(partition, offset)
            elif not passes(error):
                raise KafkaException(error)

    def _hold(self, letter: KafkaLetter) -> None:
        self._held[letter.partition].append(letter)
        self._bytes[letter.partition] += letter.size
        if self._bytes[letter.partition] >= self._most and letter.partition not in self._paused:
            self._paused.add(letter.partition)
            self._consumer.pause([TopicPartition(self._topic, letter.partition)])

    def _pass(self, partition: int, offset: int) -> None:
        if offset >= self._ends[partition]:
            self._waiting.pop(partition, None)
        elif partition in self._waiting:
            self._waiting[partition] = offset


def _letter(record: Message, partitions: int) -> KafkaLetter:
    partition, offset = record.partition() or 0, record.offset() or 0
    return KafkaLetter(
        partition,
        offset,
        offset * partitions + partition,
        record.timestamp()[1] * 1000,
        records.listed(record),
        record.key(),
        record.value() or b"",
    )
