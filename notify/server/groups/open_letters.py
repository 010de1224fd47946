"""Counts the open dead letters of each group, which were neither redriven nor dropped, in all and by their cause.

Each letter is read once; then the counts are kept up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.protocol import ids
from notify.protocol.message import DEAD_LETTER_REASON
from notify.protocol.wire import decode_payload
from notify.server.core.core import Core
from notify.server.jobs.dead_letters import DeadLetters
from notify.server.jobs.failures import Failures
from notify.server.jobs.letter_query import LOOKED_AT_ONCE
from notify.storage.records import StoredMessage

LOOKED_AT_A_TIME = 2_000
"""The most letters that one call of `look` reads: thousands after a start must not hold up other work."""
MOST_IN_ALL = 10_000
"""The most failure groups of all consumer groups together."""


@dataclass(slots=True)
class _GroupCounts:
    """The counts for one group's letters from the offset `start` to `counted_to`; `closed` were redriven or dropped."""

    start: int
    counted_to: int
    closed: int = 0
    looked_at: int = 0
    failures: Failures = field(default_factory=Failures)


class OpenLetters:
    """The counts for the groups of one server, which alone redrives their letters."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._counts: dict[str, _GroupCounts] = {}

    def count(self, group: str) -> int:
        """The number of a group's open letters; a letter that was not read yet counts as open."""
        start, _, letters = DeadLetters(self._core, group).bounds()
        counts = self._counts.get(group)
        return letters if counts is None or counts.start != start else max(0, letters - counts.closed)

    def failures(self, group: str) -> tuple[Failures, int]:
        """(the failure groups of the letters read so far, the number of these letters)."""
        counts = self._counts.get(group)
        return (Failures(), 0) if counts is None else (counts.failures, counts.looked_at)

    def closed(self, group: str, letters: Sequence[StoredMessage], items: Sequence[dict[str, Any]]) -> None:
        """Count letters that were redriven or dropped with these results."""
        counts = self._counts.get(group)
        if counts is None:
            return
        for letter, item in zip(letters, items, strict=True):
            if item["status"] in (201, 204) and counts.start <= letter.offset < counts.counted_to:
                counts.closed += 1
                counts.failures.closed(_reason(letter)[0])

    async def look(self, groups: Sequence[str]) -> None:
        """Count at most LOOKED_AT_A_TIME further letters; the next call continues there."""
        for dropped_group in self._counts.keys() - set(groups):
            del self._counts[dropped_group]
        left = LOOKED_AT_A_TIME
        for group in groups:
            left -= await self.look_at(group, left)

    async def look_at(self, group: str, most: int = LOOKED_AT_A_TIME) -> int:
        """Count at most `most` further letters of one group; returns how many it counted."""
        letters = DeadLetters(self._core, group)
        start, end, _ = letters.bounds()
        counts = self._counts.get(group)
        if counts is None or counts.start != start:
            if start == end:
                self._counts.pop(group, None)
                return 0
            counts = self._counts[group] = _GroupCounts(start, start)
        left = most
        while left > 0 and counts.counted_to < end:
            left -= await self._count_next(letters, counts, min(left, LOOKED_AT_ONCE))
        return most - left

    async def _count_next(self, letters: DeadLetters, counts: _GroupCounts, most: int) -> int:
        """Count the next letters; returns how many it read."""
        async with letters.part_of_a_search():
            batch = letters.read(counts.counted_to, most)
            sound = [m for m in batch if not m.corrupt]
            closed = await letters.are_closed(sound)
            # If no letter can be read any more, nothing is left to count.
            counts.counted_to = batch[-1].offset + 1 if batch else letters.bounds()[1]
            counts.closed += sum(closed)
            counts.looked_at += len(batch)
            may_grow = sum(len(s.failures.by_fingerprint) for s in self._counts.values()) < MOST_IN_ALL
            for m, is_closed in zip(sound, closed, strict=True):
                reason, topic = _reason(m)
                name = ids.message_id(m.transaction_id, m.message_no)
                counts.failures.note(reason, name, topic, m.committed_us, is_closed=is_closed, may_grow=may_grow)
        return max(1, len(batch))


def _reason(letter: StoredMessage) -> tuple[str, str]:
    """(the reason of a dead letter, the topic that its message was sent to)."""
    payload = decode_payload(letter.payload)
    return (payload.headers or {}).get(DEAD_LETTER_REASON, ""), payload.topic
