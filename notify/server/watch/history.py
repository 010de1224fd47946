"""Figures of a server's last hour, day and week, for charts: rates and lag."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from notify.errors import NotifyError
from notify.server.core.core import Core
from notify.server.tasks import ended, repeated
from notify.server.watch.series import LATELY, LATELY_SECONDS, Field, Kept, Series
from notify.storage.records import InDoubt

EVERY_SECONDS = 5.0
KEPT = 720
COUNTERS = ("halves", "committed", "published", "delivered", "acked", "dead_lettered")
"""Counters of notify/server/metrics.py that the history shows as rates."""
GAUGES = ("in_doubt", "parked", "lag")
"""Counts of transactions and messages at the time of a sample."""


class History:
    """Samples a core every few seconds until it is stopped."""

    def __init__(self, core: Core, lag: Callable[[], int]) -> None:
        """`lag` returns the number of messages that groups have not settled, summed over the groups."""
        self._core = core
        self._lag = lag
        self._days = Series([*map(Field, COUNTERS), *(Field(name, is_highest=True) for name in GAUGES)])
        self._rows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self._before = (time.monotonic(), self._counts())
        self._doubt = InDoubt(0, 0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        work = repeated(self._look, lambda: EVERY_SECONDS, "history_failed")
        self._task = asyncio.get_running_loop().create_task(work)

    async def stop(self) -> None:
        await ended(self._task)

    async def _look(self) -> None:
        await self._look_for_doubt()
        self.sample()

    async def _look_for_doubt(self) -> None:
        """Read the transactions in doubt. While the storage does not answer, the last answer is used."""
        with contextlib.suppress(NotifyError):
            self._doubt = await self._core.store.in_doubt()

    def sample(self) -> None:
        """Add a row: the time, each counter's rate since the last row, transactions in doubt, lag of all groups."""
        then, counts = self._before
        self._before = (now, latest) = (time.monotonic(), self._counts())
        seconds = max(0.001, now - then)
        rates = [round((new - old) / seconds, 2) for new, old in zip(latest, counts, strict=True)]
        counts_now = (float(self._doubt.prepared), float(self._doubt.parked), float(self._lag()))
        row = (self._core.clock() / 1e6, *rates, *counts_now)
        self._rows.append(row)
        self._days.add(row[0], row[1:])

    def kept(self) -> tuple[list[list[float]], Kept]:
        """The rows of the last hour, and the day and week, for a file."""
        return [list(row) for row in self._rows], self._days.kept()

    def restore(self, rows: Sequence[Sequence[float]], day: Kept) -> None:
        """Restore the figures of a file, before the first row of this server."""
        columns = len(COUNTERS) + len(GAUGES) + 1
        self._rows.extend(tuple(row) for row in rows if len(row) == columns)
        self._days.restore(day)

    def _counts(self) -> tuple[int, ...]:
        return tuple(getattr(self._core.metrics, name) for name in COUNTERS)

    def rates(self) -> dict[str, float]:
        """The newest row's rates a second, by counter; 0 before the first row."""
        newest = self._rows[-1][1 : len(COUNTERS) + 1] if self._rows else (0.0,) * len(COUNTERS)
        return dict(zip(COUNTERS, newest, strict=True))

    def columns(self, span: str = "hour") -> dict[str, Any]:
        """`at` (seconds since 1970), a list for each counter (per second), and one for each of GAUGES.

        For `5min` and an `hour`, figures of every five seconds; for a `day`, the mean rates and highest counts of every
        quarter of an hour, and for a `week`, of every two hours.
        """
        if span in ("day", "week"):
            return self._days.columns(span)
        names = ("at", *COUNTERS, *GAUGES)
        # Rows of a server before this one may be older than an hour.
        seconds = LATELY_SECONDS if span == LATELY else KEPT * EVERY_SECONDS
        rows = [row for row in self._rows if row[0] > self._rows[-1][0] - seconds]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}
