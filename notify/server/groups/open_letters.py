"""How many dead letters of each group nobody has sent again, counted once and then kept up to date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from notify.server.core.core import Core
from notify.server.jobs.redrive import LOOKED_AT_ONCE, SEARCH_SHARE, DeadLetters
from notify.storage.records import StoredMessage

LOOKED_AT_A_TIME = 2_000
"""How many letters one call of `look` looks at: thousands that a start finds must not hold up everyone else."""


@dataclass(slots=True)
class _Seen:
    """The letters of one group from `start` to `counted_to`: how many of them were sent again."""

    start: int
    counted_to: int
    redriven: int = 0


class OpenLetters:
    """Counts for the groups of one server, which alone sends their letters again."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seen: dict[str, _Seen] = {}

    def count(self, group: str) -> int:
        """The letters of a group that were not sent again; a letter that was not looked at yet counts as one."""
        start, _, letters = DeadLetters(self._core, group).bounds()
        seen = self._seen.get(group)
        return letters if seen is None or seen.start != start else max(0, letters - seen.redriven)

    def sent(self, group: str, letters: Sequence[StoredMessage], items: Sequence[dict[str, Any]]) -> None:
        """Letters were sent again, with these results."""
        seen = self._seen.get(group)
        if seen is None:
            return
        for letter, item in zip(letters, items, strict=True):
            if item["status"] == 201 and seen.start <= letter.offset < seen.counted_to:
                seen.redriven += 1

    async def look(self, groups: Sequence[str]) -> None:
        """Look at letters that are not counted yet, at most LOOKED_AT_A_TIME; the next call goes on from there."""
        for gone in self._seen.keys() - set(groups):
            del self._seen[gone]
        left = LOOKED_AT_A_TIME
        for group in groups:
            letters = DeadLetters(self._core, group)
            start, end, _ = letters.bounds()
            seen = self._seen.get(group)
            if seen is None or seen.start != start:
                if start == end:
                    self._seen.pop(group, None)
                    continue
                seen = self._seen[group] = _Seen(start, start)
            while left > 0 and seen.counted_to < end:
                left -= await self._look_at(letters, seen, min(left, LOOKED_AT_ONCE))

    async def _look_at(self, letters: DeadLetters, seen: _Seen, most: int) -> int:
        """Count the next few; how many there were."""
        async with self._core.one_search:
            began = time.perf_counter()
            batch = letters.read(seen.counted_to, most)
            redriven = await letters.are_redriven([m for m in batch if not m.corrupt])
            # Where nothing can be read any more, there is nothing to count.
            seen.counted_to = batch[-1].offset + 1 if batch else letters.bounds()[1]
            seen.redriven += sum(redriven)
            await asyncio.sleep((time.perf_counter() - began) * (1 / SEARCH_SHARE - 1))
        return max(1, len(batch))
