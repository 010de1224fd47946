"""A small file of the data directory that is written anew as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def put(path: Path, data: bytes) -> None:
    """Put this in the file's place, for its owner alone; after a crash there is the old or the new. Raises OSError.

    On a disk without room nothing of it stays: the log needs what is left.
    """
    written = path.with_suffix(".new")
    try:
        handle = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # an older version left one that others may read
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
