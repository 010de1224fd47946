"""Room kept for a full disk: retention frees segments, and must write a checkpoint and carried messages before that."""

from __future__ import annotations

from notify.storage.log.disk import Disk

NAME = "ballast"
BYTES = 16 << 20


class Ballast:
    """A file of zeros, given back when there is no other room."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def take(self) -> None:
        """Have it, if there is room for it now."""
        if NAME in self._disk.names():
            return
        try:
            fd = self._disk.open(NAME, create=True)
        except OSError:
            return
        try:
            self._disk.reserve(fd, 0, BYTES)
        except OSError:
            self.drop()
        finally:
            self._disk.close(fd)

    def drop(self) -> bool:
        """Give its room back; whether there was any."""
        if NAME not in self._disk.names():
            return False
        try:
            self._disk.unlink(NAME)
        except OSError:
            return False
        return True
