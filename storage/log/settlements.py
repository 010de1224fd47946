"""The settlements of one message, and when they were made: read back from the records behind it, which nothing indexes.

Nothing is kept for it, so it costs deliveries nothing; whoever asks waits for a bounded part of the log to be read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from notify.storage.groups import SettleKind, Settlement
from notify.storage.log.disk import Disk
from notify.storage.log.recovery import walk
from notify.storage.log.segments import Segment
from notify.storage.log.state import progress_of, records

MOST_SECONDS = 0.08
"""A search may use so much CPU time of its thread: it reads some 70 MiB of log in it, less where frames are small."""


def find(
    disk: Disk,
    segments: list[Segment],
    place: tuple[int, int, int, int],
    awaited: dict[str, int],
) -> tuple[list[Settlement], bool]:
    """The settlements of the message at `place`: (topic, queue, offset, position in the log where it may begin).

    `awaited`: of each group how many failed attempts there are, -1 for one that has settled it; reading ends when all
    of these were found. False beside the result: it ended sooner, after MOST_SECONDS or where a segment is gone.
    Takes no part in the store's state, so it may run in any thread.
    """
    topic, queue, offset, start = place
    found: list[Settlement] = []
    left = dict(awaited)
    until = time.thread_time() + MOST_SECONDS
    for segment in segments:
        if not left or time.thread_time() > until:
            break
        if segment.sealed_end and segment.sealed_end <= start:
            continue
        for time_us, record in _progress(disk, segment, start, until):
            what, group, its_topic, its_queue, runs = record
            if its_topic != topic or its_queue != queue:
                continue
            if what == "attempts":
                tried = [attempts for at, attempts, *_ in runs if at == offset]
                found += [Settlement(group, None, time_us, attempts) for attempts in tried]
                if tried and 0 <= left.get(group, -1) <= tried[-1]:
                    del left[group]
            elif any(first <= offset < first + count for first, count in runs):
                found.append(Settlement(group, SettleKind(what), time_us))
                left.pop(group, None)
            if not left:
                break
    return found, not left


def _progress(disk: Disk, segment: Segment, start: int, until: float) -> Iterator[tuple[int, list[Any]]]:
    """The records of progress in a segment, with the time of each; none where the segment was dropped meanwhile."""
    try:
        fd = disk.open(segment.name)
    except FileNotFoundError:
        return
    try:
        mine = Segment(segment.base, segment.name, fd, segment.created_us)
        mine.sealed_end = segment.sealed_end
        for frame in walk(disk, mine, start, not mine.sealed_end, []):
            if time.thread_time() > until:
                return
            for kind, _flags, _entries, data in records(frame.body):
                for record in progress_of(kind, data):
                    yield frame.time_us, record
    finally:
        disk.close(fd)
