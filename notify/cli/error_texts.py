"""Translates errors of databases and files in a command into a sentence that says what to do."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from notify.cli.printed import OutputLost
from notify.errors import InvalidRequest, NotifyError, StorageFailed, Unavailable

_NO_TABLE_STATE, _NO_TABLE_CODE = "42P01", 1146
_MAY_NOT_STATE = "42501"
_NO_SQLITE = "file is not a database"
_REMEDIES = {
    errno.ENOSPC: "Make room on its disk",
    errno.EDQUOT: "Make room in this user's quota",
    errno.EFBIG: "Raise the limit of a file's size for this process (ulimit -f)",
    errno.EIO: "Look at its disk",
}
"""The remedy by the error's number, for errors that do not name their file."""


def error_of_database(error: BaseException) -> NotifyError | None:
    """The error to show for an error of SQLAlchemy; None for any other error, and if SQLAlchemy is not installed."""
    alchemy: Any = sys.modules.get("sqlalchemy.exc")
    if alchemy is None or not isinstance(error, alchemy.DBAPIError):
        return None
    from notify.runtime.databases import reason_of  # SQLAlchemy is there, and this imports it

    reason = reason_of(error)
    state, number = getattr(error.orig, "sqlstate", None), (getattr(error.orig, "args", ()) or (None,))[0]
    if state == _NO_TABLE_STATE or number == _NO_TABLE_CODE or "no such table" in reason:
        return InvalidRequest(
            f"the database lacks a table ({reason}): create a server's tables with `notify storage upgrade --storage "
            "…`, and a service's with `notify doctor --dsn … --create-tables`, or name the right database"
        )
    if reason == _NO_SQLITE:
        return InvalidRequest("the file that the URL names is not an SQLite database: name another one")
    if state == _MAY_NOT_STATE or isinstance(error, alchemy.OperationalError | alchemy.InterfaceError):
        return Unavailable(
            f"the database does not answer, or refuses this: {reason}. Start it, or correct its URL, or the rights of "
            "its user"
        )
    return None


def error_of_file(error: BaseException) -> NotifyError | None:
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
