"""Failure groups: dead letters that died of the same cause, recognised by the reason that their consumer gave.

A reason from the SDK reads `ValueError: no customer 7 (at shop.points.add:41)`. Its fingerprint is made from the
exception's type and the function that raised it, but not from the line, which moves with the next release. A reason
without a place, such as the text of a `DeadLetter` or a reason from a consumer in another language, is compared by its
text, without numbers and quoted parts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

MOST_FAILURES = 200
"""The most failure groups of one consumer group; letters of further failure groups are only counted."""
MOST_TOPICS = 10
"""The most topics that are listed for a failure group."""
TEXT_CHARACTERS = 120

_TYPE = re.compile(r"([A-Za-z_][\w.]{0,99}): ")
_PLACE = re.compile(r" \(at ([^\s()]{1,200}):(\d{1,9})\)$")
_VARYING = re.compile(r"'[^']{0,100}'|\"[^\"]{0,100}\"|\b[0-9a-fA-F]{8}[-0-9a-fA-F]{0,40}|\d+")


class Kind(NamedTuple):
    """A cause of failures: its fingerprint, and the parts from which the fingerprint is made."""

    fingerprint: str
    """12 hexadecimal digits."""
    type: str
    """The exception's type; empty if the reason does not name it."""
    place: str
    """The function that raised it; empty if the reason does not name it."""
    text: str
    """The reason's text, with `#` instead of the parts that vary."""


@lru_cache(maxsize=1024)
def kind_of(reason: str) -> Kind:
    """The cause in a dead letter's reason."""
    place_match = _PLACE.search(reason)
    place = "" if place_match is None else place_match.group(1)
    text = reason if place_match is None else reason[: place_match.start()]
    type_match = _TYPE.match(text)
    exception = "" if type_match is None else type_match.group(1)
    text = _VARYING.sub("#", text if type_match is None else text[type_match.end() :])[:TEXT_CHARACTERS]
    parts = (exception, place) if place else (exception, "", text)
    return Kind(hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:12], exception, place, text)


@dataclass(slots=True)
class Failure:
    """The dead letters of one cause."""

    kind: Kind
    example: str
    """The complete reason of the newest letter."""
    example_id: str
    """The message id of the newest letter."""
    first_us: int
    last_us: int
    count: int = 0
    closed: int = 0
    """The number of these letters that were sent again or dropped."""
    topics: list[str] = field(default_factory=list)


class Failures:
    """The failure groups of one consumer group, counted letter by letter."""

    __slots__ = ("by_fingerprint", "others")

    def __init__(self) -> None:
        self.by_fingerprint: dict[str, Failure] = {}
        self.others = 0
        """The number of letters that belong to no failure group, because of the bound."""

    def note(self, reason: str, letter: str, topic: str, dead_us: int, *, is_closed: bool, may_grow: bool) -> None:
        """Count a letter by its reason, message id, topic and time of death. Without `may_grow` no group is added."""
        kind = kind_of(reason)
        failure = self.by_fingerprint.get(kind.fingerprint)
        if failure is None:
            if not may_grow or len(self.by_fingerprint) >= MOST_FAILURES:
                self.others += 1
                return
            failure = self.by_fingerprint[kind.fingerprint] = Failure(kind, reason, letter, dead_us, dead_us)
        failure.count += 1
        failure.closed += is_closed
        failure.first_us = min(failure.first_us, dead_us)
        if dead_us >= failure.last_us:
            failure.last_us, failure.example, failure.example_id = dead_us, reason, letter
        if topic not in failure.topics and len(failure.topics) < MOST_TOPICS:
            failure.topics.append(topic)

    def closed(self, reason: str) -> None:
        """Record that a letter that was counted as open was sent again or dropped."""
        failure = self.by_fingerprint.get(kind_of(reason).fingerprint)
        if failure is not None:
            failure.closed = min(failure.count, failure.closed + 1)

    def listed(self) -> Sequence[Failure]:
        """The failure groups, those with the most open letters first; among equals, the newest first."""
        return sorted(self.by_fingerprint.values(), key=lambda f: (f.closed - f.count, -f.last_us))
