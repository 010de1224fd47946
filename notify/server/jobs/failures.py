"""Failure groups: dead letters that died of the same cause, told by the reason that their consumer gave.

A reason of the SDK reads `ValueError: no customer 7 (at shop.points.add:41)`. Its fingerprint is of the exception's
type and of the function that raised it, not of the line, which the next release moves. A reason without a place, such
as the words of a `DeadLetter` or those of a consumer in another language, is compared by its text, without numbers and
what stands in quotation marks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

MOST_FAILURES = 200
"""Failure groups that are kept of one consumer group; letters of further ones are only counted."""
MOST_TOPICS = 10
"""Topics that are named of a failure group."""
TEXT_CHARACTERS = 120

_TYPE = re.compile(r"([A-Za-z_][\w.]{0,99}): ")
_PLACE = re.compile(r" \(at ([^\s()]{1,200}):(\d{1,9})\)$")
_VARYING = re.compile(r"'[^']{0,100}'|\"[^\"]{0,100}\"|\b[0-9a-fA-F]{8}[-0-9a-fA-F]{0,40}|\d+")


class Kind(NamedTuple):
    """A cause of failures: its fingerprint, and what this was made from."""

    fingerprint: str
    """12 hexadecimal digits."""
    type: str
    """The exception's type; empty where the reason names none."""
    place: str
    """The function that raised it; empty where the reason does not say."""
    text: str
    """The reason's text, with `#` for what varies."""


@lru_cache(maxsize=1024)
def kind_of(reason: str) -> Kind:
    """The cause that a dead letter's reason tells of."""
    known = _PLACE.search(reason)
    place = "" if known is None else known.group(1)
    text = reason if known is None else reason[: known.start()]
    named = _TYPE.match(text)
    kind = "" if named is None else named.group(1)
    text = _VARYING.sub("#", text if named is None else text[named.end() :])[:TEXT_CHARACTERS]
    parts = (kind, place) if place else (kind, "", text)
    return Kind(hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:12], kind, place, text)


@dataclass(slots=True)
class Failure:
    """The dead letters of one cause."""

    kind: Kind
    example: str
    """The newest letter's reason as it is."""
    example_id: str
    """The message of that letter."""
    first_us: int
    last_us: int
    count: int = 0
    closed: int = 0
    """Those of them that were sent again or dropped."""
    topics: list[str] = field(default_factory=list)


class Failures:
    """The failure groups of one consumer group, counted letter by letter."""

    __slots__ = ("by_fingerprint", "others")

    def __init__(self) -> None:
        self.by_fingerprint: dict[str, Failure] = {}
        self.others = 0
        """Letters beyond the bound."""

    def note(self, reason: str, letter: str, topic: str, dead_us: int, *, is_closed: bool, may_grow: bool) -> None:
        """Count a letter: its message's id and topic, and when it died. Without `may_grow` no new group is made."""
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
        """A letter that was counted as open was sent again or dropped."""
        failure = self.by_fingerprint.get(kind_of(reason).fingerprint)
        if failure is not None:
            failure.closed = min(failure.count, failure.closed + 1)

    def listed(self) -> Sequence[Failure]:
        """Those with the most open letters first, the newest first among equals."""
        return sorted(self.by_fingerprint.values(), key=lambda f: (f.closed - f.count, -f.last_us))
