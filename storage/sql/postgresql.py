"""The hot path's statements for PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy.engine import Engine

from notify.runtime.databases import WAKE_CHANNEL, is_gone
from notify.storage.sql.dialect import DECIDE, LOCK, QUOTED_COLUMNS, TABLE, Again, Duplicate, Gone, Statements, chunks
from notify.storage.sql.engines import detached
from notify.storage.sql.rows import FIXED, Row

WAKE_SECONDS = 0.02
"""The shortest time between two wake-ups of relays."""


class PostgreSql(Statements):
    """PostgreSQL through psycopg: rows by COPY."""

    holds_nul = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._woke = 0.0

    def connect(self) -> Any:
        return detached(self._engine)

    def commit(self, connection: Any) -> None:
        connection.commit()
        if time.monotonic() - self._woke > WAKE_SECONDS:
            # After the commit, not within it, because transactions that notify commit one by one.
            self._woke = time.monotonic()
            connection.execute(f"NOTIFY {WAKE_CHANNEL}")
            connection.commit()

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        with connection.cursor() as cursor:
            with cursor.copy(_COPY) as copy:
                for some in chunks(rows):
                    copy.write("".join([_copy_row(row) for row in some]))

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        # Prepared, so that it is planned once, for few ids. A list of literals is planned each time, and now and
        # then as a scan of the whole table (p90 5.3 ms instead of 1.4 ms).
        with connection.cursor() as cursor:
            cursor.execute(_PREPARED_DECIDE, (state, at, sorted(names)), prepare=True)
            return int(cursor.rowcount)

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        with connection.cursor() as cursor:
            cursor.execute(_PREPARED_LOCK, (sorted(names),), prepare=True)
            found: list[tuple[str, str, str, int]] = cursor.fetchall()
            return found

    def error(self, error: Exception) -> Exception:
        state = getattr(error, "sqlstate", None)
        if state == "23505":
            return Duplicate()
        if state in ("40001", "40P01", "55P03", "57014"):
            return Again(str(error))
        if is_gone(error) or (state is None and isinstance(error, _without_state())):
            return Gone(str(error))
        return error


def _without_state() -> tuple[type[Exception], ...]:
    """Errors of a connection that was lost or could not be made: they have no SQLSTATE."""
    import psycopg

    return (psycopg.OperationalError, psycopg.InterfaceError, OSError)


_COPY = f"COPY {TABLE} ({QUOTED_COLUMNS}) FROM STDIN"
_ANY = "= ANY(%s::text[])"
_PREPARED_DECIDE = DECIDE.replace("'{state}'", "%s").replace("'{at}'", "%s::timestamp").replace("IN ({ids})", _ANY)
_PREPARED_LOCK = LOCK.replace("IN ({})", _ANY) + " ORDER BY transaction_id FOR UPDATE"
_COPY_FIXED = "\t".join(str(v) for v in FIXED.values())
_COPY_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copied(text: str | None) -> str:
    if text is None:
        return "\\N"
    return text.translate(_COPY_ESCAPES) if not text.isalnum() else text


def _copy_number(value: float | None) -> str:
    return "\\N" if value is None else repr(value)


def _copy_row(r: Row) -> str:
    return (
        f"{r.transaction_id}\t{r.message_no}\t{_copied(r.producer_group)}\t{r.state}\t{_copied(r.topic)}\t"
        f"{_copied(r.key)}\t{_copied(r.tag)}\t{_copied(r.headers)}\t\\\\x{r.body.hex()}\t{_copy_number(r.delay)}\t"
        f"{_copied(r.deliver_at)}\t{_copy_number(r.ttl)}\t{r.created_at}\t{_copied(r.source)}\t"
        f"{_copied(r.instance)}\t{_copy_number(r.next_check_us)}\t{_copied(r.decided_at)}\t{_COPY_FIXED}\n"
    )
