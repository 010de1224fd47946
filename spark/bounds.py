"""How long a query of an audit may take, and what is said where one takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from notify.errors import Unavailable

READ_SECONDS = 3600
"""A query reads a whole table at most: some 2 billion rows in this time. A server's own statements may take 10 s."""
_STATES = ("57014",)
"""SQLSTATEs of a query that took too long: PostgreSQL's, for a query that was cancelled."""
_CODES = (1969, 3024)
"""The same in MariaDB and MySQL, as error codes."""
_CONNECTION_LOST = 2013


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Raises Unavailable, with what to do, where a query of the database `name` took too long."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        if not _is_too_long(error.orig):
            raise
        why = str(error.orig).strip().splitlines()[0]
        raise Unavailable(
            f"database {name}: a query of the audit took longer than it may ({why}); the audit allows "
            f"{READ_SECONDS:,} s, and the database may allow less. Audit a shorter time with --from and --to"
        ) from error


def _is_too_long(error: BaseException | None) -> bool:
    if getattr(error, "sqlstate", None) in _STATES:
        return True
    arguments: tuple[object, ...] = getattr(error, "args", ())
    # PyMySQL, where it gives up waiting for an answer, says so only in words.
    has_waited = arguments[:1] == (_CONNECTION_LOST,) and "timed out" in str(arguments[-1])
    return has_waited or bool(arguments and arguments[0] in _CODES)
