"""Notes of dead letters that were sent to their group again, or dropped: in `notify-redriven` and `notify-dropped`.

The note of a letter that was sent is written in one transaction with the message. Each topic is compacted and has one
partition. A record's key is `{group}/{partition}@{offset}` of the letter. Its value begins with the letter's id,
because a dead-letter topic that is deleted and made again has other messages at these offsets. After the id of a
dropped letter, a line says who dropped it, and why. An audit ignores drops: to it the letter is still dead.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from notify.kafka.table import KafkaTable

TOPIC = "notify-redriven"
_KEY = re.compile(r"(.+)/(\d{1,9})@(\d{1,18})")


class Spot(NamedTuple):
    """A letter's place: a partition of a dead-letter topic, and an offset in it."""

    partition: int
    offset: int


def _key_of(text: str) -> tuple[str, Spot] | None:
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    group, partition, offset = match.groups()
    return group, Spot(int(partition), int(offset))


def _text_of(key: tuple[str, Spot]) -> str:
    group, spot = key
    return f"{group}/{spot.partition}@{spot.offset}"


def _notes(topic: str) -> KafkaTable[tuple[str, Spot], str]:
    return KafkaTable(topic, str.encode, lambda value: value.decode("utf-8", "replace"), _text_of, _key_of)


REDRIVEN = _notes(TOPIC)
"""The ids of the letters that were sent again, by group and place."""
DROPPED = _notes("notify-dropped")
"""The notes of the letters that were dropped."""


def letter_id(named: str | None, spot: Spot) -> str:
    """A letter's id: the id in its header (`named`), or else its place."""
    return named or f"{spot.partition}@{spot.offset}"
