"""Translates errors of a file or directory in a command into a sentence that says what to do."""

from __future__ import annotations

import errno
import os

from notify.cli.printed import OutputLost
from notify.errors import InvalidRequest, NotifyError, StorageFailed

_REMEDIES = {
    errno.ENOSPC: "Make room on its disk",
    errno.EDQUOT: "Make room in this user's quota",
    errno.EFBIG: "Raise the limit of a file's size for this process (ulimit -f)",
    errno.EIO: "Look at its disk",
}
"""The remedy by the error's number, for errors that do not name their file."""


def error_for(error: BaseException) -> NotifyError | None:
    """The error to show for an OSError of a file; None for any other error, such as a connection's, or the output's."""
    if not isinstance(error, OSError) or isinstance(error, OutputLost):
        return None
    if error.filename is None:  # as while a file is written that was opened before
        remedy = _REMEDIES.get(error.errno or 0)
        return StorageFailed(f"a file cannot be written: {error.strerror}. {remedy}") if remedy else None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    return InvalidRequest(
        f"{name} cannot be used: {error.strerror or error}. Name another file or directory, or give this user the "
        "right to it"
    )
