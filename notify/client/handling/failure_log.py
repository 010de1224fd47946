"""FailureLog: logs the failures of a consumer's handlers. Each failure is one line; the traceback of a cause is written
at most once a minute, because a message that fails 16 times would repeat the same 100 lines."""

from __future__ import annotations

import time
from collections.abc import Callable

from notify.client.handling.handlers import place_of, reason_of
from notify.errors import DeadLetter
from notify.runtime.program_log import program_log
from notify.runtime.visible import one_line

log = program_log("notify.consumer")
TRACE_SECONDS = 60.0
MOST_CAUSES = 1_000


class FailureLog:
    """Remembers when each cause (an exception's type and place) was last logged with its traceback."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds."""
        self._monotonic = monotonic
        self._traced: dict[tuple[type[BaseException], str], float] = {}

    def record(self, topic: str, message_id: str, attempt: int, error: BaseException) -> None:
        """Log a failure, with the traceback if its cause was not logged with one in the last minute."""
        if isinstance(error, DeadLetter):  # on purpose: its reason is enough
            reason = one_line(reason_of(error, named=False))
            log.warning("handler of %s gave up %s, now a dead letter: %s", topic, message_id, reason)
            return
        now = self._monotonic()
        cause = type(error), place_of(error)
        logged_at = self._traced.get(cause)
        is_new = logged_at is None or now - logged_at >= TRACE_SECONDS
        if is_new:
            if len(self._traced) >= MOST_CAUSES:
                self._traced.clear()
            self._traced[cause] = now
        log.warning(
            "handler of %s failed on %s (attempt %d): %s",
            topic,
            message_id,
            attempt,
            one_line(reason_of(error)),
            exc_info=error if is_new else None,
        )
