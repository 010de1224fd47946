"""A server's own small SQLite database, admin.db in its data directory.

Its jobs and silences are in it; and where there is no registry, what servers share, too
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
    """The database in this directory, with its tables; made, for its owner's eyes only, where there is none.

    Raises OSError, and StorageFailed where the file cannot be written or is no database.
    """
    path = Path(data_dir) / "admin.db"
    path.touch(mode=0o600, exist_ok=True)
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 10})
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("BEGIN")  # all tables at once, and one sync for them
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
