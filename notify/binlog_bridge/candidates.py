"""The databases that one source can be read from: its primary, and replicas that take over.

A fault of one candidate is not a fault of all. The bridge skips a candidate that an operator has to fix, keeps the
reason, and ends only once every candidate was refused. A candidate that does not answer is not refused: it may return.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from sqlalchemy.engine import Engine

from notify.binlog_bridge.errors import Purged, Unfit
from notify.errors import NotifyError
from notify.runtime.databases import shown_url

log = logging.getLogger("notify.binlog_bridge")

PURGED_SECONDS = 30.0
"""How long to wait for candidates that lack the position once every one is refused: a replica may be behind."""


class Candidates:
    """The candidates for one source, and why some of them were refused."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        purged_seconds: float = PURGED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = list(engines)
        self._purged_seconds = purged_seconds
        self._clock = clock
        self._at = 0
        self._refused: dict[int, NotifyError] = {}
        self._refused_since = 0.0
        self._damaged: Counter[int] = Counter()

    @property
    def engine(self) -> Engine:
        """The candidate that is used now."""
        return self._engines[self._at]

    def works(self) -> None:
        """Record that messages or a position came from this candidate: earlier faults no longer count."""
        self._refused.clear()
        self._damaged.clear()

    def damaged(self) -> int:
        """Count a damaged event of this candidate; returns how many there were since anything was read."""
        self._damaged[self._at] += 1
        return self._damaged[self._at]

    def does_not_answer(self) -> None:
        """Go to the next candidate. This one may return, so it no longer counts as refused."""
        self._refused.pop(self._at, None)
        self._go_on()

    def refuse(self, error: NotifyError) -> None:
        """Go to the next candidate. If all were refused, raises the only one's error, or one with all reasons."""
        if not self._refused:
            self._refused_since = self._clock()
        self._refused[self._at] = error
        if len(self._refused) == len(self._engines) and not self._may_catch_up():
            raise self._of_all() from error
        log.warning("%s: %s; asking the next candidate", shown_url(self.engine), error)
        self._go_on()

    def dispose(self) -> None:
        for engine in self._engines:
            engine.dispose()

    def _go_on(self) -> None:
        # Its address may lead to another server by now, while the old one still serves open sessions.
        self.engine.dispose()
        self._at = (self._at + 1) % len(self._engines)

    def _may_catch_up(self) -> bool:
        if len(self._engines) == 1 or not any(isinstance(error, Purged) for error in self._refused.values()):
            return False
        return self._clock() - self._refused_since <= self._purged_seconds

    def _of_all(self) -> NotifyError:
        errors = [self._refused[at] for at in sorted(self._refused)]
        if len(errors) == 1:
            return errors[0]
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else Unfit
        reasons = "\n".join(f"- {shown_url(self._engines[at])}: {self._refused[at]}" for at in sorted(self._refused))
        return kind(f"none of this source's candidates can be read:\n{reasons}")
