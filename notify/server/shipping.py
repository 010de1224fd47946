"""Shipping the log beside the server's work: a process of its own does it (notify/storage/shipped/worker.py).

The server finishes a segment every `ship_every` seconds, keeps its retention from dropping what is not listed yet, and
starts the process again when it ends. Whatever the store does, producers and consumers go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import structlog

from notify import faults
from notify.backoff import Backoff
from notify.clock import Clock
from notify.errors import InvalidRequest, NotifyError
from notify.server.tasks import ended
from notify.settings import Settings
from notify.storage.capabilities import Shippable
from notify.storage.shipped import identity
from notify.storage.shipped.standing import Order, Standing
from notify.threads import in_thread
from notify.wire import instant
from notify.words import duration

log = structlog.get_logger("notify.server")

WORKER = "notify.storage.shipped.worker"
STALL_SECONDS = 60.0
"""How long the store may give no sign of life before a try is given up."""
SILENT_SECONDS = 120.0
"""A process that says nothing for so long hangs, and is ended."""
START_SECONDS = 15.0
"""How long the first start with a store waits to learn whether it takes this log; after that it goes on without."""
STOP_SECONDS = 5.0
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 60.0
LINE_BYTES = 64 << 10
MOST_MARKS = 1000


class Shipping:
    """Has one log shipped. Methods belong to the event loop."""

    def __init__(self, store: Shippable, settings: Settings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._directory = os.path.abspath(settings.data_dir)
        self._clock = clock
        self.standing = Standing()
        self._ended_failures = 0
        self._ended_bytes = 0
        self._ended_unreadable = 0
        """Counted by processes that have ended."""
        self._covered_us = clock()
        self._marks: deque[tuple[int, int]] = deque()
        """(position, instant): what was written up to an instant lies below a position."""
        self._is_told = asyncio.Event()
        """Set once the store has taken or refused the log."""
        self._tasks: list[asyncio.Task[None]] = []
        self._child: asyncio.subprocess.Process | None = None

    # --- figures ----------------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """Tries that failed, and processes that ended, since the server started."""
        return self._ended_failures + self.standing.failures

    @property
    def shipped_bytes(self) -> int:
        """Bytes of the segments that were listed since the server started."""
        return self._ended_bytes + self.standing.shipped_bytes

    @property
    def unreadable(self) -> int:
        """Messages without a readable payload in the tables that were written since the server started."""
        return self._ended_unreadable + self.standing.unreadable

    def behind(self) -> tuple[int, int, float]:
        """(finished segments that are not listed, bytes that are not listed, seconds): what a lost disk would take."""
        segments, size = self._store.behind(self.standing.listed_to or 0)
        if not size:
            return 0, 0, 0.0
        return segments, size, max(0.0, (self._clock() - self._covered_us) / 1e6)

    def alarm(self, most_seconds: float) -> str:
        """Why an operator has to act, "" where nobody has to. `most_seconds`: how far behind the store may be beyond
        `ship_every`, 0 for however far."""
        if self.standing.refused:
            return f"The log is not shipped any more: {self.standing.refused}"
        seconds = self.behind()[2]
        if not most_seconds or seconds <= most_seconds + self._settings.ship_every:
            return ""
        reason = f": {self.standing.failing}" if self.standing.failing else ""
        return f"The store {self._settings.ship_to} is {duration(seconds)} behind the log{reason}"

    def shown(self) -> dict[str, Any]:
        """As `GET /v1/admin/overview` shows it."""
        segments, size, seconds = self.behind()
        standing = self.standing
        return {
            "to": self._settings.ship_to,
            "behind": {"segments": segments, "bytes": size, "seconds": round(seconds, 3)},
            "listed_segments": standing.segments,
            "shipped_at": instant(standing.shipped_us) if standing.shipped_us else None,
            "failures": self.failures,
            "failing": standing.failing or None,
            "refused": standing.refused or None,
        }

    # --- starting and stopping --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to ship. Raises InvalidRequest for a URL that names no store, or one that holds another log, where this
        directory's log was not shipped there before.

        Otherwise the server does not wait for the store; one that does not answer is tried again, and an alarm says so.
        """
        self._store.hold_from(0)
        is_known = await in_thread(self._is_known)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._finish_segments())]
        if is_known:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_told.wait(), START_SECONDS)
        if self.standing.refused and not self.standing.is_superseded:
            raise InvalidRequest(f"setting ship_to: {self.standing.refused}")

    def _is_known(self) -> bool:
        """Whether this directory's log was shipped to the store before. Raises Corrupt."""
        own = identity.read(Path(self._directory))
        return own is not None and self._settings.ship_to.rstrip("/") in own.stores

    async def stop(self) -> None:
        """End the process: what it has not listed yet is shipped after the next start."""
        await ended(*self._tasks)
        await self._end_child()

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), STOP_SECONDS)
        except TimeoutError:
            child.kill()
            await child.wait()

    # --- what runs --------------------------------------------------------------------------------------------

    async def _finish_segments(self) -> None:
        """Finish the segment that is written to every `ship_every` seconds, and once at the start."""
        while True:
            try:
                self._mark(self._store.begin_segment())
            except NotifyError as error:
                log.warning("segment_not_finished", reason=str(error))  # a full disk, say
            except Exception as error:
                faults.note("segment_not_finished", error)
            await asyncio.sleep(self._settings.ship_every)

    def _mark(self, position: int) -> None:
        """Everything that is written by now lies below `position`."""
        if len(self._marks) == MOST_MARKS:
            self._marks.pop()  # the newest gives way: with it the store's age would be told too low
        self._marks.append((position, self._clock()))
        self._cover()

    def _cover(self) -> None:
        listed_to = self.standing.listed_to
        while listed_to is not None and self._marks and self._marks[0][0] <= listed_to:
            self._covered_us = self._marks.popleft()[1]

    async def _run(self) -> None:
        """Keep the process running until the store refuses the log."""
        waits = Backoff(FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS)
        while not self.standing.refused:
            try:
                await self._follow_child()
                waits.reset()
            except Exception as error:
                faults.note("shipping_failed", error)
            finally:
                await self._end_child()
            if self.standing.refused:
                return
            self._ended_failures += self.standing.failures + 1
            self._ended_bytes += self.standing.shipped_bytes
            self._ended_unreadable += self.standing.unreadable
            self.standing = msgspec.structs.replace(
                self.standing, failures=0, shipped_bytes=0, unreadable=0, dropped=0,
                failing="the process that ships ended",
            )  # fmt: skip
            log.warning("shipping_ended", remedy="it is started again")
            await asyncio.sleep(waits.next())

    async def _follow_child(self) -> None:
        """Start the process, and take over what it says until it ends."""
        child = self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            WORKER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        assert child.stdin is not None and child.stdout is not None
        settings = self._settings
        bytes_per_second = settings.ship_rate * (1 << 20)
        order = Order(self._directory, settings.ship_to, bytes_per_second, STALL_SECONDS, settings.ship_keep)
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        while line := await asyncio.wait_for(child.stdout.readline(), SILENT_SECONDS):
            self._hear(msgspec.json.decode(line, type=Standing))

    def _hear(self, said: Standing) -> None:
        before, self.standing = self.standing, said
        if said.listed_to is None:
            said.listed_to = before.listed_to
        else:
            self._store.hold_from(said.listed_to)
            self._cover()
        if said.failing and said.failing != before.failing:
            log.warning("shipping_failed", reason=said.failing)
        elif before.failing and not said.failing:
            log.info("shipping_resumed", listed_to=said.listed_to)
        if said.dropped > before.dropped:
            log.info("shipped_segments_dropped", segments=said.dropped - before.dropped)
        if said.refused:
            log.error("shipping_refused", reason=said.refused)
        if said.refused or said.listed_to is not None:
            self._is_told.set()
