"""A new segment at the end of a closed log: where a restored log goes on, so that a segment is of one life of it."""

from __future__ import annotations

from notify.storage.log.disk import Disk
from notify.storage.log.segments import Segments


def begin_at_the_end(disk: Disk, created_us: int) -> None:
    """Begin an empty segment behind the last one of a closed log. Raises OSError."""
    segments = Segments(disk)
    segments.open_existing()
    last = segments.last
    segments.create(last.base + disk.size(last.fd), created_us)
    segments.close()
