"""The log's calls to the file system, in one place, so that a test can replace them with a faulty disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from notify.storage.log.kernel_sync import KernelSync


class Disk:
    """A real directory on a real file system. Every method raises OSError as the system call does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    def open(self, name: str, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return os.open(self.directory / name, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes at `offset`; fewer only at the end of the file."""
        data = os.pread(fd, size, offset)
        while 0 < len(data) < size:
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def will_need(self, fd: int, offset: int, size: int) -> None:
        """Hint that these bytes will be read soon."""
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        written = os.pwrite(fd, data, offset)
        while written < len(data):
            written += os.pwrite(fd, memoryview(data)[written:], offset + written)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def kernel_sync(self) -> KernelSync | None:
        """An object that syncs like `sync` without a waiting thread; None if the kernel cannot do that.

        A disk that overrides `sync` has none, because its `sync` would be bypassed.
        """
        if type(self).sync is not Disk.sync:
            return None
        try:
            return KernelSync()
        except OSError:
            return None

    def reserve(self, fd: int, offset: int, size: int) -> None:
        """Reserve space for a later write, so that the write cannot fail because the disk is full."""
        os.posix_fallocate(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file whole: under another name, synced, then renamed into place.

        If it does not fit on the disk, the partial file is removed, because retention and later writes need the space.
        """
        temporary = name + ".tmp"
        try:
            self._write_whole(temporary, chunks)
            self.rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise

    def _write_whole(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.directory / old, self.directory / new)
        self.sync_directory()

    def unlink(self, name: str) -> None:
        os.unlink(self.directory / name)

    def sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
