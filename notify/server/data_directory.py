"""A data directory: the shard whose log it has, the room on its disk, and the error if it cannot be used."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from notify.errors import InvalidRequest, StorageFailed

SHARD = "shard"
"""The file with the name of the shard whose log is in the directory."""

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


def keep_shard(directory: Path, shard: str) -> None:
    """Record the shard of a directory's log, if there is room. Raises InvalidRequest if the log is another shard's.

    The rows of producers name the shard that has a half: under another name a check would take this half for one that
    does not count, and roll back a transaction that is committed.
    """
    path = directory / SHARD
    kept = ""
    with suppress(OSError):
        kept = path.read_bytes().decode(errors="replace").strip()
    if kept == shard:
        return
    if kept and any((directory / "log").glob("*.log")):
        raise InvalidRequest(
            f"{directory} has the log of shard {kept}, and rows of producers name that shard: start it with --shard "
            f"{kept}. (If no transaction of this log is in doubt, and it is to have another name nevertheless, write "
            f"the new name into {path})"
        )
    with suppress(OSError):  # a log may be read although its disk is full
        put_file(path, shard.encode())


def put_file(path: Path, data: bytes) -> None:
    """Replace the file's content; only its owner may read it. After a crash the file is the old or the new one.

    Raises OSError. If the disk is full, the unfinished new file is removed: the log needs the room.
    """
    new_path = path.with_suffix(".new")
    try:
        handle = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # an older version may have left one with wider rights
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(path)
    except OSError:
        new_path.unlink(missing_ok=True)
        raise
