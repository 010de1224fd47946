"""Translates a database's errors in a command into a sentence that says what to do, except for faults of Notify."""

from __future__ import annotations

import sys
from typing import Any

from notify.errors import InvalidRequest, NotifyError, Unavailable

_NO_TABLE_STATE, _NO_TABLE_CODE = "42P01", 1146
_MAY_NOT_STATE = "42501"
_NO_SQLITE = "file is not a database"


def error_for(error: BaseException) -> NotifyError | None:
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
