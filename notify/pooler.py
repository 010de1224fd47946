"""Poolers before PostgreSQL, such as PgBouncer: whether a connection goes through one, and in which mode.

In session mode a client has one session of the database as long as it is connected. In transaction or statement mode
it may have another with each transaction: what belongs to a session (LISTEN, session locks, settings, prepared
statements) is then somebody else's. https://www.pgbouncer.org/features.html
"""

from __future__ import annotations

import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

SESSION, TRANSACTION = "session", "transaction"
LOOKS = 5
"""The setting of one session is looked for so often from two connections: each look may meet it or not."""
REMEDY = (
    "the database is reached through a pooler in transaction mode, in which locks, LISTEN and prepared statements of a "
    "session do not hold: name the database itself, or a pooler's database with pool_mode = session"
)


def pool_mode(engine: Engine) -> str:
    """The pooler's mode: SESSION, TRANSACTION (or by statement), or "" where there is none, or it cannot be seen."""
    if engine.dialect.name != "postgresql":
        return ""
    with engine.connect() as one:
        if not _is_pooled(one):
            return ""
        with engine.connect() as other:
            return TRANSACTION if _share_a_session(one, other) else SESSION


def _is_pooled(connection: Connection) -> bool:
    """A pooler has a key of its own for cancelling, in which the database would have the number of its process."""
    driver: Any = connection.connection.driver_connection
    told = getattr(getattr(driver, "info", None), "backend_pid", None)
    if told is None:
        return False
    process = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    connection.rollback()
    return bool(told != process)


def _share_a_session(one: Connection, other: Connection) -> bool:
    """Whether a setting of one connection is seen by another, or lost to it with its transaction."""
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
