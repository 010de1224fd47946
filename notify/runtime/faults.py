"""Faults of Notify itself: each is logged with its traceback, and counted (`notify_unexpected_errors_total`).

Failures of the environment, such as a database that is unreachable or a full disk, are not faults: they pass, and their
text says enough. Servers and storages use this module; the SDK uses Python's `logging`.
"""

from __future__ import annotations

import sys
import threading
import traceback

import sqlalchemy as sa
import structlog

from notify.errors import NotifyError
from notify.runtime.log_output import LogRate

log = structlog.get_logger("notify.server")

DATABASE_AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError)
"""Errors of a database that does not answer."""
PASSING = (NotifyError, OSError, *DATABASE_AWAY)
"""Failures of the environment, and Notify's own refusals."""
FAULTS_A_SECOND = 10
"""The most faults that are logged in a second; all faults are counted."""
TRACE_FRAMES, TRACE_CHARACTERS = 20, 8000
"""How much of the end of a traceback is logged."""

_rate = LogRate(FAULTS_A_SECOND)
_lock = threading.Lock()
_count = 0


def count() -> int:
    """The number of faults since the process started."""
    return _count


def unexpected(event: str, error: BaseException | None = None, **fields: object) -> None:
    """Log and count a fault. Without `error`, it is the exception that is being handled. Any thread may call this."""
    global _count
    with _lock:
        _count += 1
        may_log = _rate.may()
    if may_log:
        # The traceback is plain text. structlog's own format, with the values of all variables, blocked the loop for
        # seconds, and would have put tokens and bodies into the log.
        error = error or sys.exc_info()[1]
        trace = "".join(traceback.format_exception(error, limit=-TRACE_FRAMES))[-TRACE_CHARACTERS:] if error else ""
        log.error(event, trace=trace, **fields)


def note(event: str, error: Exception, **fields: object) -> None:
    """Log a failure of background work that is tried again: in one line if it may pass, otherwise as a fault."""
    if isinstance(error, PASSING):
        log.warning(event, reason=str(error)[:300], **fields)
    else:
        unexpected(event, error, **fields)
