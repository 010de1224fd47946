"""The error for a data directory that cannot be used: it says why, and what to do, instead of a traceback."""

from __future__ import annotations

import errno
from pathlib import Path

from notify.errors import StorageFailed

_REMEDIES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room in the quota of this user",
    errno.EFBIG: "raise the limit of a file's size for this process (ulimit -f)",
    errno.EROFS: "its file system is read-only: mount it for writing",
    errno.EMFILE: "raise the limit of open files for this process (ulimit -n)",
}
"""The remedy by the number of the file system's error."""


def unusable(directory: str | Path, error: OSError) -> StorageFailed:
    """The error to raise if a file of the data directory cannot be made, read or written."""
    remedy = _REMEDIES.get(error.errno or 0, "let this user read and write all of it, or choose another --data-dir")
    file = f" ({error.filename})" if error.filename else ""
    return StorageFailed(f"the data directory {directory} cannot be used: {error.strerror or error}{file}; {remedy}")
