"""Figures of a server's last hour and day, for charts: rates and lag, kept in memory."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from notify import faults
from notify.server.core.core import Core
from notify.server.tasks import ended
from notify.server.watch.series import Field, Series

EVERY_SECONDS = 5.0
KEPT = 720
COUNTERS = ("halves", "committed", "published", "delivered", "acked", "dead_lettered")
"""Counters of notify/server/metrics.py that the history shows as rates."""


class History:
    """Samples a core every few seconds until it is stopped."""

    def __init__(self, core: Core, lag: Callable[[], int]) -> None:
        """`lag` gives the number of messages that groups have not settled, summed over the groups."""
        self._core = core
        self._lag = lag
        self._day = Series([*map(Field, COUNTERS), Field("lag", is_highest=True)])
        self._rows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self._before = (time.monotonic(), self._counts())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        await ended(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            try:
                self.sample()
            except Exception as error:
                faults.note("history_failed", error)

    def sample(self) -> None:
        """Add a row: the time, each counter's rate since the last row, and the lag of all groups."""
        then, counts = self._before
        self._before = (now, latest) = (time.monotonic(), self._counts())
        seconds = max(0.001, now - then)
        rates = [round((new - old) / seconds, 2) for new, old in zip(latest, counts, strict=True)]
        row = (self._core.clock() / 1e6, *rates, float(self._lag()))
        self._rows.append(row)
        self._day.add(row[0], row[1:])

    def _counts(self) -> tuple[int, ...]:
        return tuple(getattr(self._core.metrics, name) for name in COUNTERS)

    def rates(self) -> dict[str, float]:
        """The newest row's rates by counter, a second each; 0 before there is a row."""
        newest = self._rows[-1][1:-1] if self._rows else (0.0,) * len(COUNTERS)
        return dict(zip(COUNTERS, newest, strict=True))

    def columns(self, span: str = "hour") -> dict[str, Any]:
        """`at` (seconds since 1970), a list for each counter (per second), and `lag` (messages).

        Of an `hour` every five seconds; of a `day` the means, and the highest lag, of quarters of an hour.
        """
        if span == "day":
            return self._day.columns(span)
        names = ("at", *COUNTERS, "lag")
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(names)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}
