"""When checkpoints are taken, and taking one while the log is written to."""

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
        """Position of the newest checkpoint, or of the one that is being made."""
        self._bytes = 0
        self._writing = threading.Lock()
        """Held while one is written: retention takes its own while a sealing thread may be at another."""

    def is_due(self, position: int) -> bool:
        """Whether so much was written since the newest: few bytes, so that a start is quick, and many against the
        checkpoint's own."""
        return position - self.newest >= max(CHECKPOINT_EVERY_BYTES, 16 * self._bytes)

    def capture(self, position: int) -> Callable[[], bytes]:
        """Copies of the state as it is at a position; the function that is returned encodes them, in any thread."""
        saved = checkpoint.capture(self._state)
        self.newest = position
        return lambda: checkpoint.encoded(saved(), position, self._clock())

    async def take(self) -> None:
        """Take a checkpoint behind the next frame, and wait until it is durable. Raises StorageFailed or OSError."""
        taken: list[tuple[int, Callable[[], bytes]]] = []
        self._journal.reserve(4096)  # first: where it raises, the next frame must not copy the state for nobody
        self._journal.on_take.append(lambda position: taken.append((position, self.capture(position))))
        self._journal.append(RecordType.CARRY, b"")
        await self._journal.sync()
        position, encoded = taken[0]
        await self._threads.beside(self.write, encoded, position)

    def write(self, encoded: Callable[[], bytes], position: int) -> None:
        """Store what `capture` gave. Raises OSError."""
        data = encoded()
        with self._writing:
            self._bytes = len(data)
            checkpoint.write(self._disk, data, position)
