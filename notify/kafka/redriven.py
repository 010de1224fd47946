"""Notes of dead letters that were sent to their group again, or dropped: in `notify-redriven` and `notify-dropped`.

The note of a letter that was sent is written in one transaction with the message. Each topic is compacted and has one
partition. A record's key is `{group}/{partition}@{offset}` of the letter. Its value begins with the letter's id,
because a dead-letter topic that is deleted and made again has other messages at these offsets. After the id of a
dropped letter, a line says who dropped it, and why. An audit ignores drops: to it the letter is still dead.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from notify.kafka.cluster import Cluster
from notify.kafka.compacted import newest

TOPIC, DROPPED = "notify-redriven", "notify-dropped"
_KEY = re.compile(r"(.+)/(\d{1,9})@(\d{1,18})")


class Spot(NamedTuple):
    """A letter's place: a partition of a dead-letter topic, and an offset in it."""

    partition: int
    offset: int

    def key(self, group: str) -> str:
        """The key of the note about this letter of a group."""
        return f"{group}/{self.partition}@{self.offset}"


def parsed(key: str) -> tuple[str, Spot] | None:
    """Group and place in the key of a note; None for a record of another tool."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    group, partition, offset = match.groups()
    return group, Spot(int(partition), int(offset))


def letter_id(named: str | None, spot: Spot) -> str:
    """A letter's id: the id in its header (`named`), or else its place."""
    return named or f"{spot.partition}@{spot.offset}"


def read(cluster: Cluster) -> dict[tuple[str, Spot], str]:
    """The ids of all letters that were sent again; empty if there is no topic. Raises Unavailable."""
    notes = [(parsed(key.decode("utf-8", "replace")), value) for key, value in newest(cluster, TOPIC).items()]
    return {note: value.decode("utf-8", "replace") for note, value in notes if note is not None}
