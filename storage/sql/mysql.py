"""The hot path's statements for MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.runtime.databases import AGAIN_CODES, is_gone
from notify.storage.sql.dialect import FIXED_COLUMNS, FIXED_VALUES, TABLE, Again, Duplicate, Gone, Statements, chunks
from notify.storage.sql.engines import detached
from notify.storage.sql.rows import COLUMNS, Row


class MySql(Statements):
    """MySQL and MariaDB through PyMySQL."""

    def connect(self) -> Any:
        connection = detached(self._engine)
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        for some in chunks(rows):
            connection.query(_MYSQL_INSERT + ",".join([_mysql_row(row) for row in some]))

    def error(self, error: Exception) -> Exception:
        code = error.args[0] if error.args else None
        if code == 1062:
            return Duplicate()
        if code in AGAIN_CODES:
            return Again(str(error))
        if is_gone(error) or isinstance(error, OSError):
            return Gone(str(error))
        return error


_MYSQL_INSERT = f"INSERT INTO {TABLE} ({','.join(f'`{c}`' for c in (*COLUMNS, *FIXED_COLUMNS))}) VALUES "


def _quoted(text: str | None) -> str:
    """A text as a literal; in hexadecimal digits if it is not ASCII or could end a literal early."""
    if text is None:
        return "NULL"
    if text.isascii() and "'" not in text and "\\" not in text:
        return f"'{text}'"
    return f"_utf8mb4 x'{text.encode().hex()}'"


def _number(value: float | None) -> str:
    return "NULL" if value is None else repr(value)


def _mysql_row(r: Row) -> str:
    return (
        f"('{r.transaction_id}',{r.message_no},{_quoted(r.producer_group)},'{r.state}',{_quoted(r.topic)},"
        f"{_quoted(r.key)},{_quoted(r.tag)},{_quoted(r.headers)},x'{r.body.hex()}',{_number(r.delay)},"
        f"{_quoted(r.deliver_at)},{_number(r.ttl)},'{r.created_at}',{_quoted(r.source)},{_quoted(r.instance)},"
        f"{_number(r.next_check_us)},{_quoted(r.decided_at)},{FIXED_VALUES})"
    )
