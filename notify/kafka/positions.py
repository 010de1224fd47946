"""The positions of sources: each source has a compacted topic of one partition, written in the messages' transactions.

Each source has its own topic, because an open transaction hides all records after it in a partition: another source's
transaction would hide this source's newest position. A record's key is the source, its value JSON, see Standing.

A transaction with messages begins with a record here, too, which only opens it: its position comes last. If a broker
has ended the transaction in between, it refuses the position, because the client does not add the partition again. The
position would otherwise be committed alone, and the messages before it would be lost.

A long position refers to a base (see notify/movers/long_positions.py). The base has records of its own in addition to
the positions, each with a part of it, since brokers take records of 1 MiB only.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from notify.errors import InvalidRequest
from notify.kafka.brokers import COMPACTED, make_missing, new_topic
from notify.kafka.cluster import Cluster
from notify.kafka.records import POSITIONS
from notify.kafka.table import latest
from notify.movers.long_positions import LongPosition, refers_to_base
from notify.protocol.wire import UNDECODABLE

log = logging.getLogger("notify.binlog_bridge")
T = TypeVar("T")

PART_CHARACTERS = 512 << 10
"""The most characters of a base in one record."""
BASE_AGAIN = 500
"""After how many records of positions a base is written again, so that it is found near the end of the topic."""


class Standing(msgspec.Struct, frozen=True):
    """A source's position. `since`: the position before it, by which an audit sees that no position is missing."""

    epoch: int = 0
    position: str = ""
    since: str = ""


def positions_topic(source: str) -> str:
    return f"{POSITIONS}.{source}"


def make_positions_topic(cluster: Cluster, source: str) -> None:
    """Make a source's topic if it is missing. Raises Unavailable; InvalidRequest if the brokers refuse."""
    make_missing(cluster, [new_topic(positions_topic(source), 1, COMPACTED)], tells_changed=True)


def standing(cluster: Cluster, source: str) -> Standing:
    """The last record of a source. Raises Unavailable."""
    record = latest(cluster, positions_topic(source), source.encode())
    return _decoded(record, Standing, source) if record is not None else Standing()


def _decoded(record: bytes, kind: type[T], source: str) -> T:
    """Raises InvalidRequest: to begin again without the position would send everything a second time."""
    try:
        return msgspec.json.decode(record, type=kind)
    except UNDECODABLE as error:
        raise InvalidRequest(
            f"the last position of source {source!r} in {positions_topic(source)} cannot be read ({error}): another "
            "tool, or a later version of Notify, wrote it; use that version, or write the position before it again"
        ) from None


def opening(source: str) -> tuple[bytes, bytes]:
    """Key and value of the record that opens a transaction in the topic of a source."""
    return f"{source} opens".encode(), b"{}"


class Recorded:
    """The positions of one source, in the order in which its sink records them."""

    def __init__(self) -> None:
        self._source = ""
        self._at = LongPosition()
        """The last position that is recorded and committed."""
        self._next = self._at
        self._since_base = 0
        """How many positions were recorded since their base."""

    @property
    def position(self) -> str:
        return self._at.whole

    def read(self, cluster: Cluster, source: str) -> int:
        """Continue from a source's last record, and return its epoch. Raises Unavailable.

        If the topic has lost the position that was committed here, as one that was deleted, continue from that.
        """
        last = standing(cluster, source)
        if last.epoch or not self._at.whole:
            self._at = self._next = whole(cluster, source, last)
        else:
            log.warning(
                "%s has lost the position of source %s: somebody deleted the topic or its records. The position is "
                "written again as of this bridge's last commit", positions_topic(source), source,
            )  # fmt: skip
        self._source = source
        self._since_base = BASE_AGAIN  # it may have been long ago, or is lost
        return last.epoch

    def is_last(self, standing: Standing) -> bool:
        """Whether the last position that was committed is that of a source's last record."""
        return standing.position == self._at.stored

    def records(self, epoch: int, position: str) -> list[tuple[bytes, bytes]]:
        """Key and value of the records of the next position, for one transaction. Raises InvalidRequest."""
        after = self._at.moved(position)
        records: list[tuple[bytes, bytes]] = []
        if after is None or (refers_to_base(after.stored) and self._since_base >= BASE_AGAIN):
            after = LongPosition.becoming_base(position)
            texts = [position[at : at + PART_CHARACTERS] for at in range(0, len(position), PART_CHARACTERS)]
            records = [
                (_base_key(self._source, number), msgspec.json.encode(BasePart(text, len(texts))))
                for number, text in enumerate(texts)
            ]
            self._since_base = 0
        self._next = after
        value = msgspec.json.encode(Standing(epoch, after.stored, self._at.stored))
        return [*records, (self._source.encode(), value)]

    def committed(self) -> None:
        """Note that the transaction with the records of the next position is committed."""
        self._at = self._next
        self._since_base += 1


class BasePart(msgspec.Struct, frozen=True):
    """A part of a base. `parts`: how many there are."""

    text: str
    parts: int


def whole(cluster: Cluster, source: str, last: Standing) -> LongPosition:
    """The position of a source's record. Raises Unavailable; InvalidRequest if its base is missing."""
    texts: list[str] = []
    parts = 1 if refers_to_base(last.position) else 0
    while len(texts) < parts:
        record = latest(cluster, positions_topic(source), _base_key(source, len(texts)))
        part = _decoded(record, BasePart, source) if record is not None else BasePart("", 0)
        texts.append(part.text)
        parts = part.parts
    return LongPosition(last.position, "".join(texts))


def newest_whole(cluster: Cluster, source: str) -> str:
    """The newest position of a source whose bridge may be running. Raises like `whole`.

    The bridge may write another base between the look at the record and the look at its base.
    """
    last = standing(cluster, source)
    while True:
        try:
            return whole(cluster, source, last).whole
        except InvalidRequest:
            before, last = last, standing(cluster, source)
            if last == before:
                raise


def _base_key(source: str, number: int) -> bytes:
    return f"{source} base {number}".encode()
