"""Telling a target how many refused messages wait beside a source, so that its console, alarms and metrics show it."""

from __future__ import annotations

import logging
import time

from notify.errors import Forbidden, NotFound, NotifyError
from notify.sinks.sink import ShowsRefused
from notify.wire import RefusedReport

log = logging.getLogger("notify.sinks")

AGAIN_SECONDS = 60.0
"""A server forgets what it was told when it restarts."""


class Showing:
    """One mover's reports to one target; a target that takes none is left alone."""

    def __init__(self, sink: object) -> None:
        self._sink = sink if isinstance(sink, ShowsRefused) else None
        self._said: RefusedReport | None = None
        self._at = 0.0

    async def show(self, source: str, report: RefusedReport) -> None:
        """Say it where it is new, or was said long ago. A target that is away is told the next time."""
        if self._sink is None or (report == self._said and time.monotonic() - self._at < AGAIN_SECONDS):
            return
        if self._said is None and not report.waiting:
            return
        try:
            await self._sink.show_refused(source, report)
        except (Forbidden, NotFound) as error:  # an older server has no such route
            log.warning("the target's console will not show refused messages of source %s: %s", source, error)
            self._sink = None
        except NotifyError as error:
            log.info("the target was not told of refused messages: %s", error)
        else:
            self._said, self._at = report, time.monotonic()
