"""The positions of sources: each source has a compacted topic of one partition, written in the messages' transactions.

Each source has its own topic, because an open transaction hides all records after it in a partition: another source's
transaction would hide this source's newest position. A record's key is the source, its value JSON, see Standing.

A long position refers to a base (see notify/sinks/long_positions.py). The base has records of its own beside the
positions, each with a part of it, since brokers take records of 1 MiB only.
"""

from __future__ import annotations

import msgspec

from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.compacted import latest
from notify.kafka.records import POSITIONS

PART_CHARACTERS = 512 << 10
"""The most characters of a base in one record."""
SHARED = POSITIONS
"""The topic in which earlier versions stored the positions of all sources; it is read if a source's own topic has no
position yet."""


class Standing(msgspec.Struct, frozen=True):
    """A source's position. `since`: the position before it, by which an audit sees that no position is missing."""

    epoch: int = 0
    position: str = ""
    since: str = ""


def positions_topic(source: str) -> str:
    return f"{POSITIONS}.{source}"


def make_positions_topic(cluster: Cluster, source: str) -> None:
    """Make a source's topic if it is missing. Raises Unavailable; InvalidRequest if the brokers refuse."""
    make_topics(cluster, [positions_topic(source)], compacted=True)


def standing(cluster: Cluster, source: str) -> Standing:
    """The last record of a source, in its own topic, else in the topic of earlier versions.

    Raises Unavailable, also if an earlier version's transaction stays open too long in the topic of all sources.
    """
    record = latest(cluster, positions_topic(source), source.encode(), must_see=True)
    if record is not None:
        return msgspec.json.decode(record, type=Standing)
    shared = latest(cluster, SHARED, source.encode(), whole=True)
    return msgspec.json.decode(shared, type=Standing) if shared is not None else Standing()


def encoded(record: Standing) -> bytes:
    return msgspec.json.encode(record)


class BasePart(msgspec.Struct, frozen=True):
    """A part of a base. `parts`: how many there are."""

    text: str
    parts: int


def base_records(source: str, base: str) -> list[tuple[bytes, bytes]]:
    """Key and value of each record of a base."""
    texts = [base[at : at + PART_CHARACTERS] for at in range(0, len(base), PART_CHARACTERS)]
    return [
        (_base_key(source, number), msgspec.json.encode(BasePart(text, len(texts))))
        for number, text in enumerate(texts)
    ]


def base_of(cluster: Cluster, source: str) -> str:
    """What the long positions of a source refer to; "" if it has no base. Raises Unavailable."""
    texts: list[str] = []
    while True:
        record = latest(cluster, positions_topic(source), _base_key(source, len(texts)), must_see=True)
        if record is None:
            return ""
        part = msgspec.json.decode(record, type=BasePart)
        texts.append(part.text)
        if len(texts) >= part.parts:
            return "".join(texts)


def _base_key(source: str, number: int) -> bytes:
    return f"{source} base {number}".encode()
