"""Keeps the figures of charts in a file of the data directory, so that charts survive a server's restart.

The file is written every few minutes and when the server stops. If the server is killed, the figures since the last
write are lost. The file has only charts: if it is missing, damaged or of another version, the charts begin empty.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import structlog

from notify.protocol.wire import UNDECODABLE
from notify.runtime.threads import in_thread
from notify.server.data_directory import put_file
from notify.server.tasks import ended
from notify.server.watch.figures import Figures
from notify.server.watch.history import History
from notify.server.watch.series import Kept

log = structlog.get_logger("notify.server")

FILE = "charts"
VERSION = 1
EVERY_SECONDS = 300.0
SLICE_SECONDS = 0.005
"""How long figures are gathered before other tasks of the event loop run."""


class Charts(msgspec.Struct):
    """The figures of all charts of one server."""

    version: int
    rows: list[list[float]]
    """The last hour of the server as a whole, every few seconds."""
    day: Kept
    topics: dict[str, Kept]
    groups: dict[str, Kept]


class ChartFile:
    """The file of one server. Methods belong to the event loop."""

    def __init__(self, directory: Path, history: History, figures: Figures) -> None:
        self._path = directory / FILE
        self._history = history
        self._figures = figures
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Restore the figures that an earlier server of this directory wrote."""
        try:
            charts = await in_thread(self._read)
        except FileNotFoundError:
            return
        except (OSError, *UNDECODABLE) as error:
            log.warning("charts_begin_anew", file=str(self._path), reason=str(error)[:300])
            return
        if charts.version == VERSION:
            self._history.restore(charts.rows, charts.day)
            self._figures.restore(charts.topics, charts.groups)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        await ended(self._task)
        await self.keep()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.keep()

    async def keep(self) -> None:
        """Write the file. A failure is only logged."""
        rows, day = self._history.kept()
        topics: dict[str, Kept] = {}
        groups: dict[str, Kept] = {}
        began = time.perf_counter()
        for target, series in ((topics, self._figures.kept_topics()), (groups, self._figures.kept_groups())):
            for name, figures in series:
                target[name] = figures
                if time.perf_counter() - began > SLICE_SECONDS:
                    await asyncio.sleep(0)  # lets other tasks run
                    began = time.perf_counter()
        try:
            await in_thread(self._write, Charts(VERSION, rows, day, topics, groups))
        except OSError as error:
            log.warning("charts_not_kept", file=str(self._path), reason=str(error)[:300])

    def _read(self) -> Charts:
        return msgspec.msgpack.decode(self._path.read_bytes(), type=Charts)

    def _write(self, charts: Charts) -> None:
        put_file(self._path, msgspec.msgpack.encode(charts))
