"""Faults of the product itself: each is logged with its traceback, and counted (`notify_unexpected_errors_total`).

Failures of what is outside (a database that is away, a disk without room) are no faults: they pass, and their text says
enough. Servers and their storages use this; the SDK logs by Python's `logging`.
"""

from __future__ import annotations

import sys
import threading
import traceback

import sqlalchemy as sa
import structlog

from notify.errors import NotifyError
from notify.log_rate import LogRate

log = structlog.get_logger("notify.server")

DATABASE_AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError)
"""Failures by which a database does not answer."""
PASSING = (NotifyError, OSError, *DATABASE_AWAY)
"""Failures of what is outside, and refusals of our own."""
FAULTS_A_SECOND = 10
"""So many faults are logged; all of them are counted."""
TRACE_FRAMES, TRACE_CHARACTERS = 20, 8000
"""The log shows so much of the end of a traceback."""

_rate = LogRate(FAULTS_A_SECOND)
_lock = threading.Lock()
_count = 0


def count() -> int:
    """How many faults there have been since the process started."""
    return _count


def unexpected(event: str, error: BaseException | None = None, **fields: object) -> None:
    """Log and count a fault. Without `error` it is the one that is being handled. Any thread may call it."""
    global _count
    with _lock:
        _count += 1
        may = _rate.may()
    if may:
        # As plain text: structlog's own way to show it, with the values of all variables, took seconds of the loop for
        # one, and would have put tokens and bodies into the log.
        error = error or sys.exc_info()[1]
        trace = "".join(traceback.format_exception(error, limit=-TRACE_FRAMES))[-TRACE_CHARACTERS:] if error else ""
        log.error(event, trace=trace, **fields)


def note(event: str, error: Exception, **fields: object) -> None:
    """Log what failed beside the requests, and is tried again: in one line where it may pass, else as a fault."""
    if isinstance(error, PASSING):
        log.warning(event, reason=str(error)[:300], **fields)
    else:
        unexpected(event, error, **fields)
