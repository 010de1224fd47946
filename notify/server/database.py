"""A server's own small SQLite database, admin.db in its data directory.

It holds the server's jobs and silences. Without a registry it also holds what servers share
(notify/server/configuration/records.py).
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.errors import StorageFailed
from notify.server.jobs import records as jobs
from notify.server.watch import silences
from notify.storage.sql import administration


def open_database(data_dir: str) -> Engine:
    """Open the database in this directory. Make missing tables, and a missing file for its owner only.

    Raises OSError, and StorageFailed if the file cannot be written or is not a database.
    """
    path = Path(data_dir) / "admin.db"
    path.touch(mode=0o600, exist_ok=True)
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(path)), connect_args={"timeout": 10})
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("BEGIN")  # one transaction for all tables, and so one sync
            jobs.metadata.create_all(connection)
            silences.metadata.create_all(connection)
            administration.metadata.create_all(connection)
    except sa.exc.DBAPIError as error:
        engine.dispose()
        raise StorageFailed(
            f"{path} cannot be used: {error.orig}; make room on its disk, let this user read and write it, or restore "
            "a backup"
        ) from error
    return engine
