"""A quick disk for tests of the log, and a log without threads; tests/crash has faulty disks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from notify.storage.log.disk import Disk
from notify.storage.log.frame import Frame
from notify.storage.log.threads import FrameWriter, Threads, Way


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


class NoThreads(Threads):
    """Everything on the event loop: each frame is written after a delay in (virtual) seconds, so that a seed gives the
    same run every time."""

    def __init__(self, delay: Callable[[], float]) -> None:
        super().__init__()
        self._delay = delay

    def start(self, writer: FrameWriter, disk: Disk) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer

    def hand_over(self, frame: Frame, way: Way) -> None:
        self._loop.call_later(self._delay(), self.write_on_loop, frame)

    async def in_thread(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)
