"""FailureLog: what a consumer logs of handlers that fail. A traceback is written once a minute for each cause, and one
line for each failure: a message that is tried 16 times would fill the log with the same 100 lines."""

from __future__ import annotations

import logging
import time

from notify.client.handlers import place_of, reason_of
from notify.visible import one_line

log = logging.getLogger("notify.consumer")
TRACE_SECONDS = 60.0
MOST_CAUSES = 1_000


class FailureLog:
    """Knows when each cause, an exception's type and where it was raised, was logged with its traceback."""

    def __init__(self) -> None:
        self._traced: dict[tuple[type[BaseException], str], float] = {}

    def tell(self, topic: str, message_id: str, attempt: int, error: BaseException) -> None:
        """Log a failure, with its traceback where that has not been seen for a minute."""
        now = time.monotonic()
        cause = type(error), place_of(error)
        before = self._traced.get(cause)
        is_new = before is None or now - before >= TRACE_SECONDS
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
