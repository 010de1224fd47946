"""A thread that reads the log a few batches ahead of the posts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading

from notify.binlog_bridge.errors import Unreadable
from notify.binlog_bridge.log import Read, Reader
from notify.errors import NotifyError, Unavailable

log = logging.getLogger("notify.binlog_bridge")

BATCHES_AHEAD = 4
NEXT_SECONDS = 1.0
JOIN_SECONDS = 15.0
PUT_SECONDS = 0.5


class ReadAhead:
    """Reads batches in a thread, until it is closed or an error ends it."""

    def __init__(self, reader: Reader) -> None:
        """Starts the thread."""
        self._reader = reader
        self._batches: queue.Queue[Read | Exception] = queue.Queue(BATCHES_AHEAD)
        self._stop = threading.Event()
        self.caught_up_us = 0
        """See Reader, after `next` returned None: when everything up to then had been returned by `next`."""
        self._thread = threading.Thread(target=self._run, name="notify-bridge", daemon=True)
        self._thread.start()

    async def next(self) -> Read | None:
        """The next batch; None if there is none within NEXT_SECONDS. After all batches, raises the thread's error."""
        read = await asyncio.to_thread(self._next)
        if isinstance(read, Exception):
            raise read
        return read

    def _next(self) -> Read | Exception | None:
        caught_up_us = self._reader.caught_up_us  # before the wait: during it the thread may read on
        try:
            return self._batches.get(timeout=NEXT_SECONDS)
        except queue.Empty:
            self.caught_up_us = caught_up_us
            return None

    def confirm(self, position: str) -> None:
        """See Reader."""
        self._reader.confirm(position)

    async def close(self) -> None:
        """End the connection and the thread; batches that were not used are dropped."""
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
                if not self._put(batch):
                    return
        except NotifyError as error:
            self._put(error)
        except OSError as error:
            self._put(Unavailable(f"reading the log failed: {error!r}"))
        except Exception as error:
            log.exception("an event of the log cannot be read")
            self._put(
                Unreadable(
                    f"an event of the log cannot be read ({error!r}): the event is damaged, or this is a fault of "
                    "the bridge (its log has the details). Nothing was skipped: start with --backfill, which sends "
                    "the missing messages from the tables"
                )
            )

    def _put(self, item: Read | Exception) -> bool:
        """Wait for room and add an item; False if the reading was closed meanwhile."""
        while not self._stop.is_set():
            try:
                self._batches.put(item, timeout=PUT_SECONDS)
                return True
            except queue.Full:
                if isinstance(item, tuple):
                    self._reader.keep_up()
        return False
