"""Detects a pooler in front of PostgreSQL, such as PgBouncer, and its mode.

In session mode a client has the same database session as long as it is connected. In transaction or statement mode it
may get another session with each transaction. The state of a session (LISTEN, session locks, settings, prepared
statements) then belongs to another client. https://www.pgbouncer.org/features.html
"""

from __future__ import annotations

import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

SESSION, TRANSACTION = "session", "transaction"
LOOKS = 5
"""How often two connections look for a session's setting, because each look may get another session."""
REMEDY = (
    "the database is reached through a pooler in transaction mode, in which locks, LISTEN and prepared statements of a "
    "session do not hold: name the database itself, or a pooler's database with pool_mode = session"
)


def pool_mode(engine: Engine) -> str:
    """The pooler's mode: SESSION, TRANSACTION (also for statement mode), or "" without a visible pooler."""
    if engine.dialect.name != "postgresql":
        return ""
    with engine.connect() as one:
        if not is_pooled(one):
            return ""
        with engine.connect() as other:
            return TRANSACTION if _share_a_session(one, other) else SESSION


def is_pooled(connection: Connection) -> bool:
    """Whether the process number that the connection got for cancelling is not the database's, but a pooler's."""
    driver: Any = connection.connection.driver_connection
    announced_pid = getattr(getattr(driver, "info", None), "backend_pid", None)
    if announced_pid is None:
        return False
    database_pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    connection.rollback()
    return bool(announced_pid != database_pid)


def _share_a_session(one: Connection, other: Connection) -> bool:
    """Whether a setting of one connection is visible on the other, or lost after the transaction."""
    mark = uuid.uuid4().hex
    seen = sa.text("SELECT current_setting('notify.seen', true)")
    one.exec_driver_sql(f"SELECT set_config('notify.seen', '{mark}', false)")
    one.commit()
    try:
        for _ in range(LOOKS):
            for connection, expected in ((other, False), (one, True)):
                is_seen = connection.execute(seen).scalar_one() == mark
                connection.rollback()
                if is_seen != expected:
                    return True
        return False
    finally:
        one.exec_driver_sql("RESET notify.seen")
        one.commit()
