"""A thread that reads the binlog some batches ahead of what is posted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading

import pymysql

from notify.binlog_bridge.decoder import Unreadable
from notify.binlog_bridge.reader import BinlogReader, Read
from notify.errors import NotifyError, Unavailable

log = logging.getLogger("notify.bridge")

BATCHES_AHEAD = 4
NEXT_SECONDS = 1.0
JOIN_SECONDS = 15.0
PUT_SECONDS = 0.5


class ReadAhead:
    """Reads until something ends it."""

    def __init__(self, reader: BinlogReader) -> None:
        """The thread runs from now on."""
        self._reader = reader
        self._batches: queue.Queue[Read | Exception] = queue.Queue(BATCHES_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notify-binlog", daemon=True)
        self._thread.start()

    @property
    def caught_up_us(self) -> int:
        """When the source last said that it waits for something to happen; 0 once something does."""
        return self._reader.caught_up_us

    async def next(self) -> Read | None:
        """The next batch; None where there is none for a second. Raises what ended the reading, behind all batches."""
        read = await asyncio.to_thread(self._next)
        if isinstance(read, Exception):
            raise read
        return read

    def _next(self) -> Read | Exception | None:
        try:
            return self._batches.get(timeout=NEXT_SECONDS)
        except queue.Empty:
            return None

    async def close(self) -> None:
        """End the connection and the thread; what was read and not taken is dropped."""
        self._stop.set()
        self._reader.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._batches.get_nowait()
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def _run(self) -> None:
        try:
            self._reader.connect()
            for batch in self._reader.batches():
                if not self._give(batch):
                    return
        except NotifyError as error:
            self._give(error)
        except (OSError, pymysql.Error) as error:
            self._give(Unavailable(f"reading the binlog failed: {error!r}"))
        except Exception as error:
            log.exception("an event of the binlog cannot be read")
            self._give(
                Unreadable(
                    f"an event of the binlog cannot be read ({error!r}): the event is damaged, or this is a fault of "
                    "the bridge (its log has the details). Nothing was skipped: start with --backfill, which takes "
                    "what is missing from the table"
                )
            )

    def _give(self, item: Read | Exception) -> bool:
        """Wait until there is room; False where the reading is to end."""
        while not self._stop.is_set():
            try:
                self._batches.put(item, timeout=PUT_SECONDS)
                return True
            except queue.Full:
                continue
        return False
