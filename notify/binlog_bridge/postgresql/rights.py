"""PostgreSQL's errors that last until an operator acts, and what to do about each."""

from __future__ import annotations

from typing import Any

_DENIED = {
    "28000": "the user may not connect (pg_hba.conf has no line for it, for replication connections or TLS, or it has "
    "no right to replicate): ALTER ROLE … REPLICATION, and a line for its database in pg_hba.conf",
    "28P01": "the user or the password is wrong: correct the address",
    "3D000": "there is no such database: correct the address",
    "42501": "its user lacks a right: ALTER ROLE … REPLICATION (on RDS: GRANT rds_replication TO it), and GRANT "
    "SELECT, UPDATE on the tables of messages",
    "0A000": "the server cannot decode its log logically",
    "53400": "it has no free slot or walsender: raise max_replication_slots and max_wal_senders, or drop unused slots "
    "(`notify doctor --dsn … --bridge` names them)",
}
"""By SQLSTATE."""
_NO_WALSENDER = "max_wal_senders"
"""The part of the text that is the same in every language (`lc_messages`)."""
_POOLERS = ("unsupported startup parameter", "replication connections are not", "pgbouncer", "rds proxy")
POOLED = "this is a pooler such as PgBouncer, and a bridge needs the database itself: name its own host and port"


def denied(error: BaseException | None) -> str | None:
    """The remedy for a driver's error that lasts until an operator acts; None for any other error."""
    if error is None:
        return None
    text = str(error)
    if any(part in text.lower() for part in _POOLERS):
        return POOLED
    state = getattr(error, "sqlstate", None) or _state_in(text)
    if state == "53300" and _NO_WALSENDER in text:
        state = "53400"
    why = _DENIED.get(state)
    return f"{why} ({text.strip().splitlines()[0]})" if why and text.strip() else why


def _state_in(text: str) -> Any:
    """The SQLSTATE of an error while connecting, which libpq tells as a text only."""
    if "password authentication failed" in text or "no password supplied" in text:
        return "28P01"
    if "pg_hba.conf" in text or "is not permitted to log in" in text or "authentication failed" in text:
        return "28000"
    if "permission denied" in text or "must be superuser or replication role" in text:
        return "42501"
    if 'database "' in text and "does not exist" in text:
        return "3D000"
    if 'role "' in text and "does not exist" in text:
        return "28000"
    if _NO_WALSENDER in text:
        return "53400"
    return ""
