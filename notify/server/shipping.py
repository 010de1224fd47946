"""Has the log shipped by a separate process (storage/shipped/worker.py).

The server finishes a segment every `ship_every` seconds, keeps its retention from dropping segments that the store does
not list yet, and starts the process again when it ends. Producers and consumers never wait for the store.
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

from notify.admin_api.words import duration
from notify.errors import InvalidRequest, NotifyError
from notify.protocol.wire import instant
from notify.runtime import faults
from notify.runtime.backoff import Backoff
from notify.runtime.clock import Clock
from notify.runtime.threads import in_thread
from notify.server.settings import Settings
from notify.server.tasks import ended
from notify.storage.capabilities import Shippable
from notify.storage.shipped import identity
from notify.storage.shipped.status import Order, Status

log = structlog.get_logger("notify.server")

WORKER = "notify.storage.shipped.worker"
STALL_SECONDS = 60.0
"""How long the store may send nothing before a try is given up."""
SILENT_SECONDS = 120.0
"""A process that reports nothing for this long hangs, and is ended."""
START_SECONDS = 15.0
"""How long the first start with a store waits to learn whether it takes this log; then the server starts anyway."""
STOP_SECONDS = 5.0
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 60.0
LINE_BYTES = 64 << 10
MOST_MARKS = 1000


class Shipping:
    """Has one log shipped. Call its methods on the event loop only."""

    def __init__(self, store: Shippable, settings: Settings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._directory = os.path.abspath(settings.data_dir)
        self._clock = clock
        self.standing = Status()
        self._ended_failures = 0
        self._ended_bytes = 0
        self._ended_unreadable = 0
        """The counts of processes that have ended."""
        self._covered_us = clock()
        self._marks: deque[tuple[int, int]] = deque()
        """(position, instant): everything written before the instant lies below the position."""
        self._has_answered = asyncio.Event()
        """Set when the store has taken or refused the log."""
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
        """(finished segments, bytes, seconds) that the store does not list: what a loss of the disk would take."""
        segments, size = self._store.behind(self.standing.listed_to or 0)
        if not size:
            return 0, 0, 0.0
        return segments, size, max(0.0, (self._clock() - self._covered_us) / 1e6)

    def alarm(self, most_seconds: float) -> str:
        """Why an operator has to act; "" if nobody has to. `most_seconds`: how far the store may be behind, beyond
        `ship_every`; 0 for no bound."""
        if self.standing.refused:
            return f"The log is no longer shipped: {self.standing.refused}"
        seconds = self.behind()[2]
        if not most_seconds or seconds <= most_seconds + self._settings.ship_every:
            return ""
        reason = f": {self.standing.failing}" if self.standing.failing else ""
        return f"The store {self._settings.ship_to} is {duration(seconds)} behind the log{reason}"

    def shown(self) -> dict[str, Any]:
        """The state of shipping as `GET /v1/admin/overview` shows it."""
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
        """Begin to ship. At the first start with a store this raises InvalidRequest if the URL names no store, or the
        store holds another log.

        If the log was shipped there before, the start does not wait for the store. If the store does not answer, it is
        tried again, and an alarm says so.
        """
        self._store.hold_from(0)
        is_known = await in_thread(self._is_known)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._finish_segments())]
        if is_known:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_answered.wait(), START_SECONDS)
        if self.standing.refused and not self.standing.is_superseded:
            raise InvalidRequest(f"setting ship_to: {self.standing.refused}")

    def _is_known(self) -> bool:
        """Whether this directory's log was shipped to the store before. Raises Corrupt."""
        log_identity = identity.read(Path(self._directory))
        return log_identity is not None and self._settings.ship_to.rstrip("/") in log_identity.stores

    async def stop(self) -> None:
        """End the process. Segments that it has not listed yet are shipped after the next start."""
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
        """Finish the open segment now, and then every `ship_every` seconds."""
        while True:
            try:
                self._mark(self._store.begin_segment())
            except NotifyError as error:
                log.warning("segment_not_finished", reason=str(error))  # the disk may be full
            except Exception as error:
                faults.note("segment_not_finished", error)
            await asyncio.sleep(self._settings.ship_every)

    def _mark(self, position: int) -> None:
        """Note that everything written by now lies below `position`."""
        if len(self._marks) == MOST_MARKS:
            self._marks.pop()  # the newest is replaced: older ones are reached sooner
        self._marks.append((position, self._clock()))
        self._cover()

    def _cover(self) -> None:
        listed_to = self.standing.listed_to
        while listed_to is not None and self._marks and self._marks[0][0] <= listed_to:
            self._covered_us = self._marks.popleft()[1]

    async def _run(self) -> None:
        """Keep the process running until the store refuses the log."""
        backoff = Backoff(FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS)
        while not self.standing.refused:
            try:
                await self._follow_child()
                backoff.reset()
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
            await asyncio.sleep(backoff.next())

    async def _follow_child(self) -> None:
        """Start the process, and follow its reports until it ends."""
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
            self._hear(msgspec.json.decode(line, type=Status))

    def _hear(self, report: Status) -> None:
        previous, self.standing = self.standing, report
        if report.listed_to is None:
            report.listed_to = previous.listed_to
        else:
            self._store.hold_from(report.listed_to)
            self._cover()
        if report.failing and report.failing != previous.failing:
            log.warning("shipping_failed", reason=report.failing)
        elif previous.failing and not report.failing:
            log.info("shipping_resumed", listed_to=report.listed_to)
        if report.dropped > previous.dropped:
            log.info("shipped_segments_dropped", segments=report.dropped - previous.dropped)
        if report.refused:
            log.error("shipping_refused", reason=report.refused)
        if report.refused or report.listed_to is not None:
            self._has_answered.set()
