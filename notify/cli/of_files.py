"""Translates errors of a file or directory in a command into a sentence that says what to do."""

from __future__ import annotations

import os

from notify.errors import InvalidRequest, NotifyError


def error_for(error: BaseException) -> NotifyError | None:
    """The error to show for an OSError that names a file; None for any other error, such as a closed pipe."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    return InvalidRequest(
        f"{name} cannot be used: {error.strerror or error}. Name another file or directory, or give this user the "
        "right to it"
    )
