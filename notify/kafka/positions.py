"""Where each source stands: a compacted topic a source, of one partition, written in the transaction of the messages.

A topic of its own for each source, because an open transaction hides whatever follows it in a partition: another
source's would hide this one's newest position. A record's key is the source, its value JSON, see Standing.
"""

from __future__ import annotations

import msgspec

from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.compacted import latest
from notify.kafka.records import POSITIONS

SHARED = POSITIONS
"""Earlier versions kept the positions of all sources in the topic of this name; it is read where a source's own has
none yet."""


class Standing(msgspec.Struct, frozen=True):
    """How far a source is published. `since`: the position before this one; an audit sees that none is missing."""

    epoch: int = 0
    position: str = ""
    since: str = ""


def positions_topic(source: str) -> str:
    return f"{POSITIONS}.{source}"


def make_positions_topic(cluster: Cluster, source: str) -> None:
    """Make a source's topic if it is missing. Raises Unavailable, and InvalidRequest where the brokers refuse."""
    make_topics(cluster, [positions_topic(source)], compacted=True)


def standing(cluster: Cluster, source: str) -> Standing:
    """The last record of a source, in its own topic, else in the one of earlier versions.

    Raises Unavailable, also where a transaction of an earlier version is open for too long in the topic of all sources.
    """
    own = latest(cluster, positions_topic(source), source.encode(), must_see=True)
    if own is not None:
        return msgspec.json.decode(own, type=Standing)
    shared = latest(cluster, SHARED, source.encode(), whole=True)
    return msgspec.json.decode(shared, type=Standing) if shared is not None else Standing()


def encoded(known: Standing) -> bytes:
    return msgspec.json.encode(known)
