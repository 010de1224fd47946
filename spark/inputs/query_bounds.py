"""How long a query of an audit may take, and the error if it takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from notify.errors import Unavailable
from notify.runtime.databases import reason_of

READ_SECONDS = 3600
"""A query may read a whole table: about 2 billion rows in this time. Statements of a server may take 10 s."""
_STATES = ("57014",)
"""SQLSTATEs of a query that took too long: PostgreSQL's state of a cancelled query."""
_CODES = (1969, 3024)
"""Error codes of MariaDB and MySQL for a query that took too long."""
_CONNECTION_LOST = 2013


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Raises Unavailable if a query of the database `name` took too long; the error says what to do."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        if not _is_too_long(error.orig):
            raise
        raise Unavailable(
            f"database {name}: a query of the audit took longer than it may ({reason_of(error)}); the audit allows "
            f"{READ_SECONDS:,} s, and the database may allow less. Audit a shorter time with --from and --to"
        ) from error


def _is_too_long(error: BaseException | None) -> bool:
    if getattr(error, "sqlstate", None) in _STATES:
        return True
    arguments: tuple[object, ...] = getattr(error, "args", ())
    # If PyMySQL gives up waiting for an answer, only the text of its error says so.
    has_waited = arguments[:1] == (_CONNECTION_LOST,) and "timed out" in str(arguments[-1])
    return has_waited or bool(arguments and arguments[0] in _CODES)
