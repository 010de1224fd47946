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
        self._can_tell = False
        """Whether the file system gives a file the same number by its name and while it is open. Not all do."""

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
        self._can_tell = self._is_found(fd)

    def is_in_place(self) -> bool:
        """Whether the file that is locked is still the one that another process would find in the directory."""
        if self._fd is None or not self._can_tell:
            return True
        try:
            return self._is_found(self._fd)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the disk does not tell: writing to it does

    def _is_found(self, fd: int) -> bool:
        """Whether the file of the lock's name is the open one. Raises OSError."""
        return os.path.samestat(os.stat(self._directory / NAME), os.fstat(fd))

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
