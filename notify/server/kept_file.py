"""Replaces a small file of the data directory as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def put(path: Path, data: bytes) -> None:
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
