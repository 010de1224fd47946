"""Reserved space for a full disk: before retention frees a segment, it must write a checkpoint and moved messages."""

from __future__ import annotations

from notify.storage.log.disk import Disk

NAME = "ballast"
BYTES = 16 << 20


class Ballast:
    """A file of zeros, deleted when the disk is full."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def take(self) -> None:
        """Make the file if the disk has space for it."""
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
        """Delete the file; returns whether there was one."""
        if NAME not in self._disk.names():
            return False
        try:
            self._disk.unlink(NAME)
        except OSError:
            return False
        return True
