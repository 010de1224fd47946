"""Indexes of dropped segments, kept to find moved messages and ids whose retention is not over."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from notify.storage.log import index
from notify.storage.log.disk import Disk
from notify.storage.log.needed import Needed
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState

MOST_HUSKS = 16


class OrphanIndexes:
    """The orphan indexes of one log."""

    def __init__(self, disk: Disk, segments: Segments, state: LogState) -> None:
        self._disk = disk
        self._segments = segments
        self._state = state
        self._needed = Needed(state)

    def _all(self) -> list[SealedPart]:
        """The oldest first."""
        first = self._segments.first_base
        return [part for part in self._state.parts.sealed if part.base < first]

    async def merge(self, until_us: int) -> None:
        """Merge the indexes that end before an instant. Otherwise dead letters could keep one open file a segment."""
        # Up to the first index whose ids are still looked up: the merged one covers everything between the ends.
        husks = list(itertools.takewhile(lambda part: part.time_max <= until_us, self._all()))
        if len(husks) <= MOST_HUSKS:
            return
        live = [part.entries[self._needed.mask(part, await self._needed.letters(part))] for part in husks]
        kept, *others = husks
        data = index.build(np.concatenate(live).tobytes(), kept.base, husks[-1].end)
        await asyncio.to_thread(self._disk.replace, kept.name, data)
        # From here on a start skips the others: the merged one covers them.
        self._state.parts.replace(kept, SealedPart(self._disk, kept.name, is_fresh=True))
        for part in others:
            self._state.parts.remove(part)
            self._disk.unlink(part.name)

    def drop_settled(self, until_us: int) -> None:
        """Drop the indexes that end before an instant and that nothing needs any more."""
        for part in self._all():
            if part.time_max > until_us or self._needed.has_letters(part):
                continue
            if not self._needed.mask(part, np.zeros(part.count, bool)).any():
                self._state.parts.remove(part)
                self._disk.unlink(part.name)
                self._state.move_starts_of(part.runs["key"].tolist())
