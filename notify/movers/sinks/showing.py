"""Reports to a target how many refused messages of a source wait, for its console, alarms and metrics."""

from __future__ import annotations

import logging
import time

from notify.errors import Forbidden, NotFound, NotifyError
from notify.movers.sinks.sink import ShowsRefused
from notify.protocol.wire import RefusedReport

log = logging.getLogger("notify.sinks")

AGAIN_SECONDS = 60.0
"""After this time the same report is sent again, because a server forgets reports when it restarts."""


class Showing:
    """One mover's reports to one target; a target that refuses a report gets no more."""

    def __init__(self, sink: object) -> None:
        self._sink = sink if isinstance(sink, ShowsRefused) else None
        self._last_report: RefusedReport | None = None
        self._at = 0.0

    async def show(self, source: str, report: RefusedReport) -> None:
        """Send the report if it is new, or was last sent long ago. If the target is unreachable, the next call tries
        again."""
        if self._sink is None or (report == self._last_report and time.monotonic() - self._at < AGAIN_SECONDS):
            return
        if self._last_report is None and not report.waiting:
            return
        try:
            await self._sink.show_refused(source, report)
        except (Forbidden, NotFound) as error:  # an older server has no such route
            log.warning("the target's console will not show refused messages of source %s: %s", source, error)
            self._sink = None
        except NotifyError as error:
            log.info("the target did not get the report of refused messages: %s", error)
        else:
            self._last_report, self._at = report, time.monotonic()
