"""The settlements of one message, and when they were made: read back from the records behind it, which nothing indexes.

Nothing is kept for it, so it costs deliveries nothing; whoever asks waits for a bounded part of the log to be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from notify.storage.groups import SettleKind, Settlement
from notify.storage.log.disk import Disk
from notify.storage.log.records import Progressed, progressed, records
from notify.storage.log.recovery import walk
from notify.storage.log.segments import Segment

MOST_SECONDS = 0.08
"""A search may use so much CPU time of its thread: it reads some 70 MiB of log in it, less where frames are small."""


class Place(NamedTuple):
    """A message in a queue, and the position in the log behind which its settlements are."""

    topic: int
    queue: int
    offset: int
    start: int


def search(
    disk: Disk,
    segments: list[Segment],
    place: Place,
    awaited: dict[str, int],
    worked: Callable[[], float] = time.thread_time,
) -> tuple[list[Settlement], bool]:
    """The settlements of the message at `place`.

    `awaited`: the number of attempts and interruptions by group, -1 for a group that has settled it; reading ends once
    all of these were found. False beside the result: it ended sooner, after MOST_SECONDS or where a segment is gone.
    `worked`: a clock in seconds of this thread's work. Takes no part in the store's state, so it may run in any thread.
    """
    met: list[Settlement] = []
    left = dict(awaited)
    until = worked() + MOST_SECONDS
    for segment in segments:
        if not left or worked() > until:
            break
        if segment.sealed_end and segment.sealed_end <= place.start:
            continue
        for time_us, record in _progress(disk, segment, place.start, lambda: worked() > until):
            if (record.topic, record.queue) != (place.topic, place.queue):
                continue
            if isinstance(record.what, str):  # ATTEMPTS
                tried = [
                    settlement
                    for attempt in record.runs
                    if attempt[0] == place.offset
                    and (settlement := Settlement.of_attempt(record.group, time_us, attempt)) is not None
                ]
                met += tried
                if tried and 0 <= left.get(record.group, -1) <= tried[-1].attempts + tried[-1].interruptions:
                    del left[record.group]
            elif any(first <= place.offset < first + count for first, count in record.runs):
                met.append(Settlement(record.group, SettleKind(record.what), time_us))
                left.pop(record.group, None)
            if not left:
                break
    return met, not left


def _progress(
    disk: Disk, segment: Segment, start: int, is_over: Callable[[], bool]
) -> Iterator[tuple[int, Progressed]]:
    """The records of progress in a segment, with the time of each; none where the segment was dropped meanwhile."""
    try:
        fd = disk.open(segment.name)
    except FileNotFoundError:
        return
    try:
        again = Segment(segment.base, segment.name, fd, segment.created_us)
        again.sealed_end = segment.sealed_end
        for frame in walk(disk, again, start, not again.sealed_end, []):
            if is_over():
                return
            for record in records(frame.body):
                for progress in progressed(record.kind, record.data):
                    yield frame.time_us, progress
    finally:
        disk.close(fd)
