"""Waits for the disk: for frames in one of three ways, for index files and checkpoints in threads.

A frame that few requests wait for is synced on the event loop itself while the disk is fast: any other way costs more
than the sync. Other frames are synced by the kernel while the loop continues, or, if the kernel or the file
system cannot do that, by a thread (docs/adr/0002, 0041). The simulation passes an object without threads.
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
    """The one that waits while a frame is synced."""

    LOOP = auto()
    THREAD = auto()
    KERNEL = auto()


class FrameWriter(Protocol):
    """The journal's methods for each frame. Any thread may call the first two."""

    def write_frame(self, frame: Frame) -> None:
        """Hand a frame's bytes to the operating system. Raises OSError."""

    def sync_frame(self, frame: Frame) -> None:
        """Wait until the frame's bytes are on the disk. Raises OSError."""

    def synced_frame(self, frame: Frame, seconds: float) -> None:
        """A frame is on the disk; `seconds`: how long the sync took."""

    def written(self, frame: Frame) -> None:
        """A frame is on the disk. Called on the loop, as the last step."""

    def fail(self, error: BaseException) -> object:
        """The disk has failed. Called on the loop."""


class Threads:
    """The threads of one log. Call `start` first; only `tell` may be called outside the event loop's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._writer: FrameWriter
        self._to_write: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kernel: KernelSync | None = None
        self._in_kernel: tuple[Frame, float] | None = None
        """The frame that the kernel is syncing, and since when."""

    def start(self, writer: FrameWriter, disk: Disk) -> None:
        """Get ready to write frames. Call it on the running loop."""
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
        """Write a frame, after the previous one was written. LOOP writes it once the loop has run its due callbacks."""
        if way is Way.LOOP:
            self._loop.call_soon(self.write_on_loop, frame)
        elif way is Way.KERNEL and self._kernel is not None:
            self._write_and_submit(frame, self._kernel)
        else:
            self._to_write.put(frame)

    def write_on_loop(self, frame: Frame) -> None:
        """Write a frame in this thread."""
        try:
            self._write(frame)
        except Exception as error:  # such as MemoryError: else all that follow would wait for this frame for ever
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
        """Write a frame in this thread and let the kernel sync it."""
        try:
            self._writer.write_frame(frame)
        except Exception as error:  # as in `write_on_loop`
            self._writer.fail(error)
            return
        try:
            kernel.submit(frame.segment.fd)
        except OSError:
            # A file system refuses before the sync begins: the thread writes the same bytes again and syncs them.
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
            # The loop is closed, so nothing waits for the call.
            return

    async def in_thread(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in a thread, and wait for it. Raises what it raises."""
        await asyncio.to_thread(function, *arguments)

    async def close(self) -> None:
        """End the writing thread, after it has written its frames."""
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
