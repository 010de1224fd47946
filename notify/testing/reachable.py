"""Waits until a database server accepts connections."""

from __future__ import annotations

import time
from pathlib import Path

import sqlalchemy as sa


class NotAvailable(Exception):
    """A database cannot run here; tests that need it are skipped with this reason."""


def wait_for(url: str, seconds: float = 120) -> None:
    """Wait until a connection to the database works. Raises the last OperationalError after `seconds`."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    deadline = time.monotonic() + seconds
    while True:
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # the pause between two tries to connect


def wait_for_file(path: Path, seconds: float = 120) -> None:
    """Wait for the file of the server's socket, because PyMySQL leaks a socket when it fails to connect."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise NotAvailable(f"the database server did not make {path}")
        time.sleep(0.05)  # the pause between two polls
