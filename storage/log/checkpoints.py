"""Decides when to take a checkpoint, and takes it while the log is being written."""

from __future__ import annotations

import threading
from collections.abc import Callable

from notify.runtime.clock import Clock
from notify.storage.log import checkpoint
from notify.storage.log.disk import Disk
from notify.storage.log.journal import Journal
from notify.storage.log.records import RecordType
from notify.storage.log.state import LogState
from notify.storage.log.threads import Threads

CHECKPOINT_EVERY_BYTES = 64 << 20


class Checkpoints:
    """Takes checkpoints of one log's state."""

    def __init__(self, disk: Disk, state: LogState, journal: Journal, clock: Clock, threads: Threads) -> None:
        self._disk = disk
        self._state = state
        self._journal = journal
        self._clock = clock
        self._threads = threads
        self.newest = 0
        """Position of the newest checkpoint, including one that is being written."""
        self._bytes = 0
        self._writing = threading.Lock()
        """Held while a checkpoint is written: retention and a sealing thread may each take one."""

    def is_due(self, position: int) -> bool:
        """Whether enough was written since the newest one: few bytes keep a start quick; more than the checkpoint's
        own bytes keep its cost small."""
        return position - self.newest >= max(CHECKPOINT_EVERY_BYTES, 16 * self._bytes)

    def capture(self, position: int) -> Callable[[], bytes]:
        """Copy the state at a position. The returned function encodes the copy, in any thread."""
        saved = checkpoint.capture(self._state)
        self.newest = position
        return lambda: checkpoint.encoded(saved(), position, self._clock())

    async def take(self) -> None:
        """Take a checkpoint after the next frame, and wait until it is durable. Raises StorageFailed or OSError."""
        taken: list[tuple[int, Callable[[], bytes]]] = []
        self._journal.reserve(4096)  # first: if it raises, the next frame must not copy the state in vain
        self._journal.on_take.append(lambda position: taken.append((position, self.capture(position))))
        self._journal.append(RecordType.CARRY, b"")
        await self._journal.sync()
        position, encoded = taken[0]
        await self._threads.in_thread(self.write, encoded, position)

    def write(self, encoded: Callable[[], bytes], position: int) -> None:
        """Store what `capture` returned. Raises OSError."""
        data = encoded()
        with self._writing:
            self._bytes = len(data)
            checkpoint.write(self._disk, data, position)
