"""Begins a new segment when a restored log is opened: a segment never spans two generations."""

from __future__ import annotations

from notify.storage.log.disk import Disk
from notify.storage.log.recovery import walk
from notify.storage.log.segments import Segment, Segments, segment_name


def begin_at_the_end(disk: Disk, created_us: int) -> None:
    """Begin an empty segment after the last one of a closed log. Raises OSError."""
    segments = Segments(disk)
    segments.open_existing()
    last = segments.last
    segments.create(last.base + disk.size(last.fd), created_us)
    segments.close()


def last_frame_us(disk: Disk, base: int) -> int:
    """When the last valid frame of the segment that begins there was written, in microseconds since 1970; 0: it has
    no frame. Raises OSError."""
    name = segment_name(base)
    fd = disk.open(name)
    try:
        time_us = 0
        for frame in walk(disk, Segment(base, name, fd, 0), 0, True, []):
            time_us = frame.time_us
        return time_us
    finally:
        disk.close(fd)
