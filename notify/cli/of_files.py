"""Errors of a file or directory that a command was told to use, as a sentence that says what to do."""

from __future__ import annotations

import os

from notify.errors import InvalidRequest, NotifyError


def told(error: BaseException) -> NotifyError | None:
    """The error to show for one of the system's that names a file; None for any other, such as a closed pipe."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    shown = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    return InvalidRequest(
        f"{shown} cannot be used: {error.strerror or error}. Name another file or directory, or give this user the "
        "right to it"
    )
