"""The lock that lets only one process open a log."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from notify.errors import StorageFailed

NAME = "lock"


class DirectoryLock:
    """A file lock, which the system releases however its process ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None

    def take(self) -> None:
        """Raises StorageFailed if another process has it."""
        fd = os.open(self._directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise StorageFailed(
                f"another process uses {self._directory}; stop it, or give this one another --data-dir"
            ) from None
        self._fd = fd

    def is_in_place(self) -> bool:
        """Whether the file that is locked is still the one that another process would find in the directory."""
        if self._fd is None:
            return True
        try:
            found = os.stat(self._directory / NAME)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the disk does not tell: writing to it does
        return os.path.samestat(found, os.fstat(self._fd))

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
