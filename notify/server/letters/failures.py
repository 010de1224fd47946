"""Failure groups: dead letters that died of the same cause, recognised by the reason that their consumer gave; counts.

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
from typing import Any, Generic, NamedTuple

from notify.protocol.message import DEAD_LETTER_REASON
from notify.protocol.wire import Payload, instant
from notify.server.letters.engine import LOT_BYTES, Fate, L, LetterEngine, Look

MOST_FAILURES = 200
"""The most failure groups of one consumer group; letters of further failure groups are only counted."""
MOST_TOPICS = 10
"""The most topics that are listed for a failure group."""
TEXT_CHARACTERS = 120
LOOKED_AT = 2_000
"""The most letters that one look reads, in parts: thousands after a start must not hold up other work."""
MOST_IN_ALL = 10_000
"""The most failure groups of all consumer groups together."""
MOST_LETTERS = 100_000
"""The most letters of a group that are counted, the oldest first, and"""
MOST_GROUPS = 100
"""the most groups whose counts are held (the one asked for longest ago is dropped), if other servers close letters as
well: then the place of each open letter is held in memory.
"""

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


@dataclass(slots=True)
class _GroupCounts:
    """The counts for one group's letters before the number `next`."""

    since: object
    next: int
    looked_at: int = 0
    closed: int = 0
    is_over: bool = False
    failures: Failures = field(default_factory=Failures)
    total: int = 0
    """The number of letters that there may be."""
    open: list[Any] = field(default_factory=list)
    """Open letters without their content, each with its reason, if other servers close letters as well."""


class LetterCounts(Generic[L]):
    """Counts the letters of each group, and those that are closed, in all and by their cause.

    Each letter is read once; then the counts are kept up to date.
    """

    def __init__(self, engine: LetterEngine[L]) -> None:
        self._engine = engine
        self._counts: dict[str, _GroupCounts] = {}

    def closed_of(self, group: str, since: object) -> int:
        """How many of a group's letters are known to be closed; a letter that was not read yet counts as open."""
        counts = self._counts.get(group)
        return 0 if counts is None or counts.since != since else counts.closed

    def closed(self, group: str, letters: Sequence[L], items: Sequence[dict[str, Any]]) -> None:
        """Count letters that this server closed with these results."""
        counts = self._counts.get(group)
        if counts is None or not self._engine.closes_alone:
            return
        for letter, item in zip(letters, items, strict=True):
            if item["status"] in (201, 204) and letter.number < counts.next:
                self._close(counts, reason_of(letter.payload()))

    async def look(self, groups: Sequence[str]) -> None:
        """Count at most LOOKED_AT further letters of these groups; others are forgotten. The next call continues."""
        for dropped_group in self._counts.keys() - set(groups):
            del self._counts[dropped_group]
        left = LOOKED_AT
        for group in groups:
            left -= await self.look_at(group, left)

    async def look_at(self, group: str, most: int) -> int:
        """Count at most `most` further letters of one group; returns how many it counted."""
        bounds, is_alone = await self._engine.bounds(group), self._engine.closes_alone
        counts = self._counts.get(group)
        if counts is None or counts.since != bounds.since:
            self._counts.pop(group, None)
            if is_alone and bounds.start == bounds.end:
                return 0
            counts = _GroupCounts(bounds.since, bounds.start)
        self._put(group, counts)
        counts.total = bounds.most
        await self._look_at_open(group, counts)
        left = most if is_alone else min(most, MOST_LETTERS - counts.looked_at)
        counted = 0
        while counted < left and not (is_alone and counts.next >= bounds.end):
            counted += await self._count_next(group, counts, left - counted)
            if counts.is_over or not is_alone:
                break
        return counted

    async def shown(self, group: str) -> dict[str, Any]:
        """The failure groups as the routes show them, with the next letters counted."""
        await self.look_at(group, LOOKED_AT)
        counts = self._counts.get(group) or _GroupCounts(None, 0)
        return {
            "failures": [_row(failure) for failure in counts.failures.listed()],
            "others": counts.failures.others,
            "looked_at": counts.looked_at,
            "of": counts.looked_at if counts.is_over else max(counts.total, counts.looked_at),
        }

    def _put(self, group: str, counts: _GroupCounts) -> None:
        """Keep the counts as those asked for last."""
        self._counts.pop(group, None)
        self._counts[group] = counts
        if not self._engine.closes_alone and len(self._counts) > MOST_GROUPS:
            del self._counts[next(iter(self._counts))]

    async def _look_at_open(self, group: str, counts: _GroupCounts) -> None:
        """Look which of the open letters other servers have closed."""
        if self._engine.closes_alone or not counts.open:
            return
        fates = await self._engine.fates(group, [letter for letter, _ in counts.open])
        still_open = []
        for each, fate in zip(counts.open, fates, strict=True):
            if fate is Fate.OPEN:
                still_open.append(each)
            else:
                self._close(counts, each[1])
        counts.open = still_open

    async def _count_next(self, group: str, counts: _GroupCounts, most: int) -> int:
        """Count the next letters; returns how many it read."""
        engine = self._engine
        async with engine.turn():
            part = await engine.read(group, counts.next, Look(lambda _: True, most, LOT_BYTES))
            fates = await engine.fates(group, part.letters)
            counts.next, counts.is_over = part.next, part.is_over
            counts.looked_at += part.looked_at
            may_grow = sum(len(c.failures.by_fingerprint) for c in self._counts.values()) < MOST_IN_ALL
            for letter, fate in zip(part.letters, fates, strict=True):
                payload, is_closed = letter.payload(), fate is not Fate.OPEN
                reason = reason_of(payload)
                counts.closed += is_closed
                counts.failures.note(
                    reason, letter.id, payload.topic, letter.dead_us, is_closed=is_closed, may_grow=may_grow
                )
                if not (is_closed or engine.closes_alone):
                    counts.open.append((letter.alone(), reason))
        return part.looked_at

    def _close(self, counts: _GroupCounts, reason: str) -> None:
        counts.closed += 1
        counts.failures.closed(reason)


def reason_of(payload: Payload) -> str:
    """The reason that a dead letter gives for its death."""
    return (payload.headers or {}).get(DEAD_LETTER_REASON, "")


def _row(failure: Failure) -> dict[str, Any]:
    return {
        "fingerprint": failure.kind.fingerprint,
        "type": failure.kind.type or None,
        "place": failure.kind.place or None,
        "text": failure.kind.text,
        "count": failure.count,
        "open": failure.count - failure.closed,
        "first_at": instant(failure.first_us),
        "last_at": instant(failure.last_us),
        "topics": failure.topics,
        "example": {"id": failure.example_id, "reason": failure.example},
    }
