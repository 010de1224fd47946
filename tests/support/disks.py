"""A disk for tests of what a log does while it runs and when its process ends; faulty disks are in tests/crash."""

from __future__ import annotations

from collections.abc import Iterable

from notify.storage.log.disk import Disk


class UnsyncedDisk(Disk):
    """Syncs nothing and reserves little: a process that dies leaves the same behind, and no test waits for a sync."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self) -> None:
        pass

    def reserve(self, fd: int, offset: int, size: int) -> None:
        super().reserve(fd, offset, min(size, 1 << 16))

    def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        (self.directory / f"{name}.tmp").write_bytes(b"".join(chunks))
        self.rename(f"{name}.tmp", name)
