"""The lock by which one process at a time has a log open."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from notify.errors import StorageFailed

NAME = "lock"


class DirectoryLock:
    """A file lock: it goes with its process, whatever becomes of that."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None

    def take(self) -> None:
        """Raises StorageFailed where another process has it."""
        fd = os.open(self._directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise StorageFailed(
                f"another process uses {self._directory}; stop it, or give this one another --data-dir"
            ) from None
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
