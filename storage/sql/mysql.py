"""The hot path's statements for MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.errors import TooLarge
from notify.runtime.databases import AGAIN_CODES, is_gone
from notify.storage.sql.dialect import (
    FIXED_COLUMNS,
    FIXED_VALUES,
    STATEMENT_BYTES,
    STATEMENT_ROWS,
    TABLE,
    Again,
    Duplicate,
    Gone,
    Statements,
)
from notify.storage.sql.engines import detached
from notify.storage.sql.rows import COLUMNS, Row


class MySql(Statements):
    """MySQL and MariaDB through PyMySQL."""

    _packet = 0
    """The server's max_allowed_packet, in bytes."""

    def connect(self) -> Any:
        connection = detached(self._engine)
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            self._packet = int(cursor.fetchone()[0])
        return connection

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        """Raises TooLarge, too, for a row that the server does not take: it would end the connection instead."""
        most = self._packet - len(_MYSQL_INSERT) - 1
        some: list[str] = []
        size = 0
        for row in rows:
            text = _mysql_row(row)
            if len(text) > most:
                raise TooLarge(
                    f"the database takes statements of {self._packet:,} bytes, and this message needs "
                    f"{len(text):,}: SET GLOBAL max_allowed_packet to more, and in the configuration"
                )
            if some and (size + len(text) > min(most, 2 * STATEMENT_BYTES) or len(some) == STATEMENT_ROWS):
                connection.query(_MYSQL_INSERT + ",".join(some))
                some, size = [], 0
            some.append(text)
            size += len(text) + 1
        connection.query(_MYSQL_INSERT + ",".join(some))

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
