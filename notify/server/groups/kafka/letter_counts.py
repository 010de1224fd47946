"""Counts dead letters by reading them: offsets alone would count the transactions' markers too."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from notify.kafka import records
from notify.kafka.codes import GONE
from notify.kafka.groups import DEAD_LETTER
from notify.kafka.redriven import Spot, letter_id
from notify.kafka.table import arrived, reader
from notify.server.groups.kafka.answers import passes
from notify.server.groups.kafka.brokers import READERS, Brokers
from notify.server.groups.kafka.offsets import Place

LOOK_SECONDS = 0.5
LOOK_BYTES = 32 << 20
"""The bounds of one look. Letters that it does not reach count by their offsets until the next look."""
AT_ONCE = 500
POLL_SECONDS = 0.1


@dataclass(slots=True)
class _Counted:
    """The count of a partition's letters from `start` to before `read_to`."""

    start: int
    read_to: int
    letters: int = 0
    others: dict[int, str] = field(default_factory=dict)
    """The ids of letters, by offset, where all notes are about letters of an earlier topic of this name; "": no letter.
    """


class OffsetCounts:
    """The counts of letters by partition. Used by one thread at a time."""

    def __init__(self, brokers: Brokers, noted: Callable[[str, Spot], Collection[str]]) -> None:
        """`noted`: the ids of a group's letters in the notes about a place, which were read before each look."""
        self._brokers = brokers
        self._noted = noted
        self._counted: dict[Place, _Counted] = {}
        self._consumer: Consumer | None = None

    def look(self, bounds: Mapping[Place, tuple[int, int]]) -> dict[Place, int]:
        """The number of letters in each of these partitions. Raises KafkaException."""
        before = self._counted
        self._counted = {place: _continued(before.get(place), *bound) for place, bound in bounds.items()}
        unread = {place: end for place, (_, end) in bounds.items() if self._counted[place].read_to < end}
        if unread:
            self._read(unread)
        return {place: counted.letters + bounds[place][1] - counted.read_to for place, counted in self._counted.items()}

    def is_about(self, topic: str, spot: Spot, note: str) -> bool:
        """Whether a note with this id is about the letter that is at this place now. A letter not read yet counts."""
        counted = self._counted.get((topic, spot.partition))
        return counted is not None and counted.others.get(spot.offset, note) == note

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _read(self, unread: dict[Place, int]) -> None:
        if self._consumer is None:
            self._consumer = reader(self._brokers.cluster, READERS)
        self._consumer.assign([TopicPartition(*place, self._counted[place].read_to) for place in unread])
        deadline, size = time.monotonic() + LOOK_SECONDS, 0
        while unread and time.monotonic() < deadline and size < LOOK_BYTES:
            for record in arrived(self._consumer, AT_ONCE, POLL_SECONDS):
                error, place = record.error(), (record.topic() or "", record.partition() or 0)
                if error is None:
                    size += len(record.value() or b"")
                    self._look_at(place, record)
                elif error.code() in GONE:
                    unread.pop(place, None)
                    continue
                elif passes(error):
                    continue
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                self._pass(place, record.offset() or 0, unread, is_letter=error is None)
        self._consumer.unassign()

    def _look_at(self, place: Place, record: Message) -> None:
        """Keep the id of a letter whose place has only notes about others."""
        spot = Spot(place[1], record.offset() or 0)
        noted = self._noted(place[0].removeprefix(DEAD_LETTER), spot)
        name = letter_id(records.header(records.listed(record), records.ID), spot) if noted else ""
        if noted and name not in noted and place in self._counted:
            self._counted[place].others[spot.offset] = name

    def _pass(self, place: Place, offset: int, unread: dict[Place, int], *, is_letter: bool) -> None:
        """Count up to an offset, which is that of a letter or of the partition's end."""
        end = unread.get(place)
        if end is None:
            return  # written after the bounds were asked for: counted by the next look
        counted = self._counted[place]
        for without in range(counted.read_to, min(offset, end)):  # such as a transaction's marker
            if self._noted(place[0].removeprefix(DEAD_LETTER), Spot(place[1], without)):
                counted.others[without] = ""
        if is_letter and offset < end:
            counted.letters += 1
        counted.read_to = min(end, offset + 1 if is_letter else offset)
        if counted.read_to >= end:
            del unread[place]


def _continued(counted: _Counted | None, start: int, end: int) -> _Counted:
    """The count so far; a new one if letters were deleted, or the topic was recreated."""
    if counted is None or counted.start != start or counted.read_to > end:
        return _Counted(start, start)
    return counted
