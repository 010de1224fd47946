"""A quick disk for tests of the log; tests/crash has faulty disks."""

from __future__ import annotations

from collections.abc import Iterable

from notify.storage.log.disk import Disk


class UnsyncedDisk(Disk):
    """A disk that never syncs and reserves little: enough for tests that kill only the process."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self) -> None:
        pass

    def reserve(self, fd: int, offset: int, size: int) -> None:
        super().reserve(fd, offset, min(size, 1 << 16))

    def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        (self.directory / f"{name}.tmp").write_bytes(b"".join(chunks))
        self.rename(f"{name}.tmp", name)
