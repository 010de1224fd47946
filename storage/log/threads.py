"""Where the log waits for the disk: for frames in one of three ways, for index files and checkpoints in threads.

A frame that few requests wait for is synced on the event loop itself while the disk is fast: every other way costs more
than the sync. Behind any other frame the kernel syncs, and the loop goes on meanwhile; where the kernel or the file
system does not do that, a thread does (docs/adr/0002, 0041). The simulation hands in an object that has no threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from queue import SimpleQueue
from typing import Protocol

from notify.storage.log.disk import Disk
from notify.storage.log.frame import Frame
from notify.storage.log.kernel_sync import KernelSync


class Way(Enum):
    """Who waits while a frame is synced."""

    LOOP = auto()
    THREAD = auto()
    KERNEL = auto()


class FrameWriter(Protocol):
    """The journal, as it is called for each frame. The first two methods may be called by any thread."""

    def write_frame(self, frame: Frame) -> None:
        """Hand a frame's bytes to the operating system. Raises OSError."""

    def sync_frame(self, frame: Frame) -> None:
        """Wait until its bytes are on the disk. Raises OSError."""

    def synced_frame(self, frame: Frame, seconds: float) -> None:
        """A frame is on the disk, after so long a sync."""

    def written(self, frame: Frame) -> None:
        """A frame is on the disk; called by the loop, the last of all."""

    def fail(self, error: BaseException) -> object:
        """The disk has failed; called by the loop."""


class Threads:
    """The threads of one log. `start` comes first; everything but `tell` belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._writer: FrameWriter
        self._to_write: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kernel: KernelSync | None = None
        self._in_kernel: tuple[Frame, float] | None = None
        """The frame that the kernel syncs, and since when."""

    def start(self, writer: FrameWriter, disk: Disk) -> None:
        """Be ready to write frames; called on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._thread = threading.Thread(target=self._write_frames, name="notify-log-writer", daemon=True)
        self._thread.start()
        self._kernel = disk.kernel_sync()
        if self._kernel is not None:
            self._loop.add_reader(self._kernel.event_fd, self._kernel_has_synced)

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel can sync."""
        return self._kernel is not None

    def hand_over(self, frame: Frame, way: Way) -> None:
        """Write a frame; the one before it is written. With LOOP when the loop has done what is due now."""
        if way is Way.LOOP:
            self._loop.call_soon(self.write_on_loop, frame)
        elif way is Way.KERNEL and self._kernel is not None:
            self._write_and_submit(frame, self._kernel)
        else:
            self._to_write.put(frame)

    def write_on_loop(self, frame: Frame) -> None:
        """Write a frame here and now."""
        try:
            self._write(frame)
        except OSError as error:
            self._writer.fail(error)
        else:
            self._writer.written(frame)

    def _write(self, frame: Frame) -> None:
        writer = self._writer
        writer.write_frame(frame)
        started = time.perf_counter()
        writer.sync_frame(frame)
        writer.synced_frame(frame, time.perf_counter() - started)

    def _write_and_submit(self, frame: Frame, kernel: KernelSync) -> None:
        """Write a frame here and let the kernel sync it."""
        try:
            self._writer.write_frame(frame)
        except OSError as error:
            self._writer.fail(error)
            return
        try:
            kernel.submit(frame.segment.fd)
        except OSError:
            # No file system has refused before it began: the thread writes the same bytes once more, and syncs them.
            self._close_kernel(kernel)
            self._to_write.put(frame)
        else:
            self._in_kernel = frame, time.perf_counter()

    def _kernel_has_synced(self) -> None:
        kernel, in_kernel = self._kernel, self._in_kernel
        if kernel is None or in_kernel is None:
            return
        frame, started = in_kernel
        self._in_kernel = None
        try:
            kernel.result()
        except OSError as error:
            self._writer.fail(error)
            return
        self._writer.synced_frame(frame, time.perf_counter() - started)
        self._writer.written(frame)

    def tell(self, callback: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function. For any thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: nobody is left who could be told.
            return

    async def beside(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function beside the event loop, and wait for it. Raises what it raises."""
        await asyncio.to_thread(function, *arguments)

    async def close(self) -> None:
        """End the writing thread, after it has written what it was handed."""
        self._to_write.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._kernel is not None:
            self._close_kernel(self._kernel)

    def _close_kernel(self, kernel: KernelSync) -> None:
        self._kernel = None
        self._loop.remove_reader(kernel.event_fd)
        kernel.close()

    def _write_frames(self) -> None:
        while (frame := self._to_write.get()) is not None:
            try:
                self._write(frame)
            except BaseException as error:
                self.tell(self._writer.fail, error)
                return
            self.tell(self._writer.written, frame)
