"""Copies the administrators' records of a log (`admin.db` in its data directory) consistently."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

NAME = "admin.db"
COPY = "shipping-records.tmp"
BUSY_SECONDS = 10.0

Signature = tuple[tuple[int, int], ...]


def signature(data_dir: Path) -> Signature | None:
    """A value that changes whenever the records do; None if there are none."""
    found = []
    for name in (NAME, NAME + "-wal"):
        try:
            status = os.stat(data_dir / name)
        except FileNotFoundError:
            continue
        found.append((status.st_mtime_ns, status.st_size))
    return tuple(found) or None


def copy_into(data_dir: Path, target: Path) -> None:
    """Copy a database by SQLite's own backup, which is consistent while others write. Raises sqlite3.Error."""
    with (
        contextlib.closing(sqlite3.connect(data_dir / NAME, timeout=BUSY_SECONDS)) as source,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)


@contextlib.contextmanager
def copied(data_dir: Path) -> Iterator[Path]:
    """A copy by SQLite's own backup, taken while a server may write. It is deleted when the context ends.

    Raises OSError if SQLite cannot make it.
    """
    copy = data_dir / COPY
    copy.unlink(missing_ok=True)
    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        copy_into(data_dir, copy)
        yield copy
    except sqlite3.Error as error:
        raise OSError(f"{data_dir / NAME} cannot be copied: {error}") from None
    finally:
        copy.unlink(missing_ok=True)
