"""Reads topics of one partition, mostly compacted ones, each time from where the last reading ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from notify.errors import InvalidRequest, Unavailable
from notify.kafka import records
from notify.kafka.codes import GONE
from notify.kafka.records import Headers
from notify.kafka.table import KafkaTable, arrived, reader
from notify.kafka.topic_ids import topic_ids
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, passes
from notify.server.groups.kafka.brokers import READERS, Brokers
from notify.server.groups.kafka.offsets import Place

log = structlog.get_logger("notify.server")

POLL_SECONDS = 0.1
AT_ONCE = 1000
KEY_BYTES = 1024
"""The most bytes of a key; a record with a longer one is another tool's. A group, a topic and numbers fit."""


class News(NamedTuple):
    """A new record."""

    topic: str
    key: str
    value: bytes | None
    at_us: int
    """When it was written, in microseconds since 1970."""
    offset: int
    headers: Headers


K = TypeVar("K")
V = TypeVar("V")


class CompactedTopics:
    """Yields each committed record of its topics once, with one consumer. Used by one thread at a time."""

    def __init__(
        self, brokers: Brokers, forget: Callable[[str], object], newest: int = 0, seconds: float = CALL_SECONDS
    ) -> None:
        """`forget`: called with a topic that was deleted or recreated, whose earlier records no longer count.

        `newest`: how many of the newest records are read, roughly, when a topic is read for the first time; 0: all.
        `seconds`: how long a reading waits for a record, or for the end of a transaction.
        """
        self._brokers = brokers
        self._forget = forget
        self._newest = newest
        self._seconds = seconds
        self._consumer: Consumer | None = None
        self._ids: dict[str, str] = {}
        self._read_to: dict[Place, int] = {}
        """The offset after the last record that was read, transactions' markers included."""

    def news(self, topics: Collection[str], *, whole: bool = False) -> Iterator[News]:
        """The records since the last reading, up to the present end; none for a topic that does not exist.

        Without `whole` a topic that has no leader now gives no records either. With `whole` every topic has to exist,
        and transactions that are open in it are waited for: records that were committed behind them are hidden.
        Raises KafkaException, TimeoutError, Unavailable.
        """
        ids = topic_ids(self._brokers.admin, topics, CALL_SECONDS)  # asked before the ends
        unknown: set[str] = set()
        places = [(topic, 0) for topic in topics]
        if whole:
            ends = offsets.whole(offsets.ends(self._brokers.admin, places), places)
        else:
            ends = offsets.latest(self._brokers.admin, places, unknown)
        for place in [place for place in places if place[0] not in unknown]:
            read_to, known = self._read_to.get(place, 0), self._ids.get(place[0], "")
            if read_to and (ends.get(place, 0) < read_to or ids.get(place[0], known) != known):
                del self._read_to[place]
                self._forget(place[0])
        self._ids |= ids
        unread = {place: end for place, end in ends.items() if self._read_to.get(place, 0) < end}
        if unread:
            yield from self._read(unread)

    def rows(self, table: KafkaTable[K, V], *, whole: bool = False) -> Iterator[tuple[K, V, int]]:
        """The key, value and time (microseconds since 1970) of a table's new records.

        One of a later version or another tool is left out: the earlier row holds.
        """
        for record in self.news([table.topic], whole=whole):
            row = row_of(table, record)
            if row is not None:
                yield *row, record.at_us

    def read_again(self, topic: str) -> None:
        """Let the next reading of a topic begin at its first record."""
        self._read_to.pop((topic, 0), None)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _read(self, unread: dict[Place, int]) -> Iterator[News]:
        if self._consumer is None:
            self._consumer = reader(self._brokers.cluster, READERS)
        for place, end in unread.items():
            self._read_to.setdefault(place, max(0, end - self._newest) if self._newest else 0)
        self._consumer.assign([TopicPartition(*place, self._read_to[place]) for place in unread])
        deadline = time.monotonic() + self._seconds
        while unread:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"Kafka gives nothing of topic {next(iter(unread))[0]!r} for {self._seconds:g} s, where another "
                    "transaction may be open; try again"
                )
            for record in arrived(self._consumer, AT_ONCE, POLL_SECONDS):
                error, place = record.error(), (record.topic() or "", record.partition() or 0)
                if place not in unread:
                    continue  # written after its end was asked for: left to the next reading
                if error is None:
                    deadline = time.monotonic() + self._seconds
                    self._pass(place, (record.offset() or 0) + 1, unread)
                    if len(record.key() or b"") <= KEY_BYTES:
                        yield _news(record)
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._pass(place, record.offset() or 0, unread)
                elif error.code() in GONE:
                    del unread[place]
                elif not passes(error):
                    raise KafkaException(error)
        self._consumer.unassign()

    def _pass(self, place: Place, offset: int, unread: dict[Place, int]) -> None:
        self._read_to[place] = max(self._read_to[place], offset)
        if self._read_to[place] >= unread[place]:
            del unread[place]


def row_of(table: KafkaTable[K, V], record: News) -> tuple[K, V] | None:
    """The row of a record; None, and a warning, if it cannot be read."""
    try:
        return table.row(record.key, record.value)
    except InvalidRequest as error:
        log.warning("kafka_record_not_read", topic=record.topic, key=record.key[:100], reason=str(error)[:300])
        return None


def _news(record: Message) -> News:
    key = (record.key() or b"").decode("utf-8", "replace")
    at_us = record.timestamp()[1] * 1000
    return News(record.topic() or "", key, record.value(), at_us, record.offset() or 0, records.listed(record))
