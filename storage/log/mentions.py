"""Finds the stored bodies that a log names, by searching the bytes of its segments.

Halves, delayed and held messages, retries and dead letters are all payloads in segments, so that a search of the bytes
misses none of them. It also finds names that no message needs any more; that only costs space in the store. Files
that recovery has set aside are searched too, because a person may still read messages from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from notify.protocol.large_bodies import MENTION_BYTES, mentioned
from notify.storage.log.disk import Disk
from notify.storage.log.journal import Journal
from notify.storage.log.segments import SET_ASIDE, Segment, Segments

PAGE_BYTES = 64 << 20
"""The most bytes that one call reads."""
PAGE_NAMES = 10_000
"""A call ends once it has found this many."""
CHUNK_BYTES = 1 << 20


class Mentions:
    """The names in one log."""

    def __init__(self, disk: Disk, segments: Segments, journal: Journal) -> None:
        self._disk = disk
        self._segments = segments
        self._journal = journal

    async def stored_bodies(self, after: str) -> tuple[set[str], str]:
        """See NamesBodies. A place is a position in the log.

        Payloads that are moved out of a dropped segment go to the end of the log. So a search in the order of positions
        that reaches the end finds them before or after the move.
        """
        await self._journal.sync()
        start, durable = int(after or 0), self._journal.durable
        found, end = await asyncio.to_thread(search, self._disk, self._segments.all(), start, durable)
        if not after:
            found |= await asyncio.to_thread(search_set_aside, self._disk)
        return found, "" if end >= durable else str(end)


def search(disk: Disk, segments: Sequence[Segment], start: int, durable: int) -> tuple[set[str], int]:
    """The names between two positions, and the end of the search: `durable`, or earlier if that is too much for
    one call, or if a segment was dropped meanwhile. Takes no part in the log's state, so it may run in any thread."""
    found: set[str] = set()
    left = PAGE_BYTES
    for number, segment in enumerate(segments):
        end = segments[number + 1].base if number + 1 < len(segments) else durable
        position = max(start, segment.base)
        if end <= position:
            continue
        try:
            fd = disk.open(segment.name)
        except FileNotFoundError:
            return found, end - 1 if end == durable else end  # what was moved out of it is after `durable`
        try:
            size = disk.size(fd)
            while position < end:
                chunk = disk.read(fd, min(CHUNK_BYTES, end - position), position - segment.base)
                found |= mentioned(chunk)
                left -= len(chunk)
                if position + len(chunk) >= min(end, segment.base + size):
                    break
                position += len(chunk) - MENTION_BYTES  # a name may cross two chunks
                if left <= 0 or len(found) >= PAGE_NAMES:
                    return found, position
        finally:
            disk.close(fd)
    return found, durable


def search_set_aside(disk: Disk) -> set[str]:
    """The names in the files that recovery has set aside. They are few, so one call reads them all."""
    found: set[str] = set()
    for name in disk.names():
        if not name.endswith(SET_ASIDE):
            continue
        fd = disk.open(name)
        try:
            position = 0
            while chunk := disk.read(fd, CHUNK_BYTES, position):
                found |= mentioned(chunk)
                position += len(chunk) if len(chunk) < CHUNK_BYTES else len(chunk) - MENTION_BYTES
        finally:
            disk.close(fd)
    return found
