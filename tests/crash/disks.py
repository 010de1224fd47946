"""Faulty disks for the real log: unsynced sectors vanish, syncs fail, room runs out."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable
from pathlib import Path

from tests.support.disks import UnsyncedDisk

SECTOR = 512


class PowerLossDisk(UnsyncedDisk):
    """Remembers unsynced writes; `lose_power` keeps a random subset of them, by 512-byte sectors.

    Files created since the last sync of the directory are kept or lost at random, too. After it nothing is written.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        super().__init__(directory)
        self._chance = chance
        self.name_of: dict[int, str] = {}
        """By file descriptor."""
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {}
        self._new: set[str] = set()
        self.dead = False

    def open(self, name: str, create: bool = False) -> int:
        fd = super().open(name, create)
        self.name_of[fd] = name
        if create:
            self._new.add(name)
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._check()
        name = self.name_of[fd]
        size = self.size(fd)
        before = self.read(fd, len(data), offset)
        before += bytes(max(0, min(len(data), size - offset) - len(before)))
        self._unsynced.setdefault(name, []).append((offset, before.ljust(len(data), b"\0")))
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._check()
        self._unsynced.pop(self.name_of[fd], None)

    def sync_directory(self) -> None:
        self._check()
        self._new.clear()

    def reserve(self, fd: int, offset: int, size: int) -> None:
        self._check()
        super().reserve(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        self._check()
        super().truncate(fd, size)

    def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._check()
        super().replace(name, chunks)

    def unlink(self, name: str) -> None:
        self._check()
        super().unlink(name)

    def _check(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the power is gone")

    def lose_power(self) -> None:
        """Write nothing from now on, and keep or lose each unsynced sector at random."""
        self.dead = True
        for name, writes in self._unsynced.items():
            path = self.directory / name
            if not path.exists():
                continue
            fd = os.open(path, os.O_RDWR)
            for offset, before in reversed(writes):
                self._restore_some(fd, offset, before)
            os.close(fd)
        for name in self._new:
            if self._chance.random() < 0.5:
                (self.directory / name).unlink(missing_ok=True)

    def _restore_some(self, fd: int, offset: int, before: bytes) -> None:
        at = offset
        end = offset + len(before)
        while at < end:
            sector_end = min(end, (at // SECTOR + 1) * SECTOR)
            if self._chance.random() < 0.5:
                os.pwrite(fd, before[at - offset : sector_end - offset], at)
            at = sector_end


class FailingSyncDisk(UnsyncedDisk):
    """The n-th sync fails once, as fsync does when the kernel could not write; the next one would succeed."""

    def __init__(self, directory: Path, fail_at: int) -> None:
        super().__init__(directory)
        self._left = fail_at
        self.syncs_after_failure = 0

    def sync(self, fd: int) -> None:
        self._left -= 1
        if self._left == 0:
            raise OSError(errno.EIO, "injected: sync failed")
        if self._left < 0:
            self.syncs_after_failure += 1
        super().sync(fd)


class FullDisk(UnsyncedDisk):
    """A disk without room beyond `room` bytes a file, until that is changed."""

    def __init__(self, directory: Path, room: int) -> None:
        super().__init__(directory)
        self.room: int | None = room

    def reserve(self, fd: int, offset: int, size: int) -> None:
        if self.room is not None and offset + size > self.room:
            raise OSError(errno.ENOSPC, "injected: no space left on device")
        super().reserve(fd, offset, size)
