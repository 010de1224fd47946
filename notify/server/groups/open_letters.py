"""How many dead letters of each group nobody has sent again or dropped, in all and by their cause.

Each letter is looked at once, and the figures are then kept up to date.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from notify import ids
from notify.message import DEAD_LETTER_REASON
from notify.server.core.core import Core
from notify.server.jobs.dead_letters import SEARCH_SHARE, DeadLetters
from notify.server.jobs.failures import Failures
from notify.server.jobs.wanted import LOOKED_AT_ONCE
from notify.storage.records import StoredMessage
from notify.wire import decode_payload

LOOKED_AT_A_TIME = 2_000
"""How many letters one call of `look` looks at: thousands that a start finds must not hold up everyone else."""
MOST_IN_ALL = 10_000
"""Failure groups that are kept, of all consumer groups together."""


@dataclass(slots=True)
class _Seen:
    """The letters of one group from `start` to `counted_to`: how many of them were sent again or dropped."""

    start: int
    counted_to: int
    closed: int = 0
    looked_at: int = 0
    failures: Failures = field(default_factory=Failures)


class OpenLetters:
    """Counts for the groups of one server, which alone sends their letters again."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seen: dict[str, _Seen] = {}

    def count(self, group: str) -> int:
        """A group's letters that nobody has sent again or dropped; one that was not looked at yet counts as such."""
        start, _, letters = DeadLetters(self._core, group).bounds()
        seen = self._seen.get(group)
        return letters if seen is None or seen.start != start else max(0, letters - seen.closed)

    def failures(self, group: str) -> tuple[Failures, int]:
        """The failure groups of what was looked at so far, and how many letters that were."""
        seen = self._seen.get(group)
        return (Failures(), 0) if seen is None else (seen.failures, seen.looked_at)

    def closed(self, group: str, letters: Sequence[StoredMessage], items: Sequence[dict[str, Any]]) -> None:
        """Letters were sent again or dropped, with these results."""
        seen = self._seen.get(group)
        if seen is None:
            return
        for letter, item in zip(letters, items, strict=True):
            if item["status"] in (201, 204) and seen.start <= letter.offset < seen.counted_to:
                seen.closed += 1
                seen.failures.closed(_reason(letter)[0])

    async def look(self, groups: Sequence[str]) -> None:
        """Look at letters that are not counted yet, at most LOOKED_AT_A_TIME; the next call goes on from there."""
        for gone in self._seen.keys() - set(groups):
            del self._seen[gone]
        left = LOOKED_AT_A_TIME
        for group in groups:
            left -= await self.look_at(group, left)

    async def look_at(self, group: str, most: int = LOOKED_AT_A_TIME) -> int:
        """Look at letters of one group that are not counted yet; how many there were."""
        letters = DeadLetters(self._core, group)
        start, end, _ = letters.bounds()
        seen = self._seen.get(group)
        if seen is None or seen.start != start:
            if start == end:
                self._seen.pop(group, None)
                return 0
            seen = self._seen[group] = _Seen(start, start)
        left = most
        while left > 0 and seen.counted_to < end:
            left -= await self._count_next(letters, seen, min(left, LOOKED_AT_ONCE))
        return most - left

    async def _count_next(self, letters: DeadLetters, seen: _Seen, most: int) -> int:
        """Count the next few; how many there were."""
        async with self._core.one_search:
            began = time.perf_counter()
            batch = letters.read(seen.counted_to, most)
            sound = [m for m in batch if not m.corrupt]
            closed = await letters.are_closed(sound)
            # Where nothing can be read any more, there is nothing to count.
            seen.counted_to = batch[-1].offset + 1 if batch else letters.bounds()[1]
            seen.closed += sum(closed)
            seen.looked_at += len(batch)
            may_grow = sum(len(s.failures.by_fingerprint) for s in self._seen.values()) < MOST_IN_ALL
            for m, is_closed in zip(sound, closed, strict=True):
                reason, topic = _reason(m)
                name = ids.message_id(m.transaction_id, m.message_no)
                seen.failures.note(reason, name, topic, m.committed_us, is_closed=is_closed, may_grow=may_grow)
            await asyncio.sleep((time.perf_counter() - began) * (1 / SEARCH_SHARE - 1))
        return max(1, len(batch))


def _reason(letter: StoredMessage) -> tuple[str, str]:
    """Why a message is dead, and the topic that it was sent to."""
    payload = decode_payload(letter.payload)
    return (payload.headers or {}).get(DEAD_LETTER_REASON, ""), payload.topic
