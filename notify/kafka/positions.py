"""The positions of sources: each source has a compacted topic of one partition, written in the messages' transactions.

Each source has its own topic, because an open transaction hides all records after it in a partition: another source's
transaction would hide this source's newest position. A record's key is the source, its value JSON, see Standing.
"""

from __future__ import annotations

import msgspec

from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.compacted import latest
from notify.kafka.records import POSITIONS

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
