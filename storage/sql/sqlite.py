"""The hot path's statements for SQLite."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import Any

from notify.runtime.databases import is_doubled
from notify.storage.sql.dialect import FIXED_VALUES, QUOTED_COLUMNS, TABLE, Again, Duplicate, Statements
from notify.storage.sql.engines import detached
from notify.storage.sql.rows import COLUMNS, Row


class Sqlite(Statements):
    """SQLite: one writer at a time, by its own lock."""

    for_update = ""

    def connect(self) -> Any:
        return _SqliteConnection(detached(self._engine))

    def insert(self, connection: Any, rows: Sequence[Row]) -> None:
        connection.begin()
        with connection.cursor() as cursor:
            cursor.executemany(_SQLITE_INSERT, rows)

    def decide(self, connection: Any, names: Sequence[str], state: str, at: str) -> int:
        connection.begin()
        return super().decide(connection, names, state, at)

    def lock(self, connection: Any, names: Sequence[str]) -> list[tuple[str, str, str, int]]:
        connection.begin()
        return super().lock(connection, names)

    def error(self, error: Exception) -> Exception:
        if is_doubled(error):
            return Duplicate()
        if isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error)):
            return Again(str(error))
        return error


_SQLITE_INSERT = f"INSERT INTO {TABLE} ({QUOTED_COLUMNS}) VALUES ({','.join('?' * len(COLUMNS))},{FIXED_VALUES})"


class _SqliteConnection:
    """sqlite3's connection with explicit BEGIN IMMEDIATE, and cursors that close."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._began = False

    def begin(self) -> None:
        if not self._began:
            self._real.execute("BEGIN IMMEDIATE")
            self._began = True

    def cursor(self) -> Any:
        return contextlib.closing(self._real.cursor())

    def commit(self) -> None:
        if self._began:
            self._real.execute("COMMIT")
        self._began = False

    def rollback(self) -> None:
        if self._began:
            self._real.execute("ROLLBACK")
        self._began = False

    def close(self) -> None:
        self._real.close()
