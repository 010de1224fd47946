"""Where the log's work runs that may wait for the disk: frames in one thread, index files and checkpoints in others.

A frame may also be written on the event loop itself: while the disk is fast and few requests wait, the way to the
thread and back costs more than the sync (docs/adr/0002). The simulation hands in an object that has no threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from notify.storage.log.frame import Frame


class Threads:
    """The threads of one log. `start` comes first; everything but `tell` belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._write: Callable[[Frame], None]
        self._written: Callable[[Frame], None]
        self._failed: Callable[[BaseException], object]
        self._to_write: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(
        self,
        write: Callable[[Frame], None],
        written: Callable[[Frame], None],
        failed: Callable[[BaseException], object],
    ) -> None:
        """Be ready to `write` frames. The running loop calls `written` behind each, or `failed` with the error."""
        self._loop = asyncio.get_running_loop()
        self._write, self._written, self._failed = write, written, failed
        self._thread = threading.Thread(target=self._write_frames, name="notify-log-writer", daemon=True)
        self._thread.start()

    def hand_over(self, frame: Frame, on_loop: bool) -> None:
        """Write a frame, once the one before it is written; with `on_loop` when the loop has done what is due now."""
        if on_loop:
            self._loop.call_soon(self.write_on_loop, frame)
        else:
            self._to_write.put(frame)

    def write_on_loop(self, frame: Frame) -> None:
        """Write a frame here and now."""
        try:
            self._write(frame)
        except OSError as error:
            self._failed(error)
        else:
            self._written(frame)

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

    def _write_frames(self) -> None:
        while (frame := self._to_write.get()) is not None:
            try:
                self._write(frame)
            except BaseException as error:
                self.tell(self._failed, error)
                return
            self.tell(self._written, frame)
