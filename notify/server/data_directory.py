"""A data directory that cannot be used, and the room on its disk."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

from notify.errors import StorageFailed

_REMEDIES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room in the quota of this user",
    errno.EFBIG: "raise the limit of a file's size for this process (ulimit -f)",
    errno.EROFS: "its file system is read-only: mount it for writing",
    errno.EMFILE: "raise the limit of open files for this process (ulimit -n)",
}
"""The remedy by the number of the file system's error."""


class Room(NamedTuple):
    """The size of a disk, and its free room, in bytes."""

    total: int
    free: int

    @property
    def used_share(self) -> float:
        """How full the disk is, from 0 to 1; 0 for a file system that does not tell its size, as some of FUSE do."""
        return 1 - self.free / self.total if self.total else 0.0


def room_of(directory: str | Path) -> Room:
    """The room on the disk of a directory, also of one that is gone: metrics and alarms continue. Raises OSError."""
    place = Path(directory).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    return Room(usage.total, usage.free)


def unusable(directory: str | Path, error: OSError) -> StorageFailed:
    """The error to raise if a file of the data directory cannot be made, read or written."""
    remedy = _REMEDIES.get(error.errno or 0, "let this user read and write all of it, or choose another --data-dir")
    file = f" ({error.filename})" if error.filename else ""
    return StorageFailed(f"the data directory {directory} cannot be used: {error.strerror or error}{file}; {remedy}")
