"""A source of any kind: its id, its clock, and whether it takes writes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.errors import InvalidRequest
from notify.movers.outbox import source_name
from notify.protocol.wire import microseconds
from notify.runtime.databases import database_now


def id_of(connection: Connection) -> str:
    """The source id in the database; "" if it has none."""
    try:
        return source_name(connection)
    except InvalidRequest:
        return ""


def is_read_only(connection: Connection) -> bool:
    """Whether the source accepts writes only from its primary.

    A user with all rights may still write to a MySQL. Its binlog then has a GTID that conflicts with the primary's
    next one, and replication ends.
    """
    if connection.dialect.name == "postgresql":
        return bool(connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar())
    return str(connection.exec_driver_sql("SELECT @@read_only").scalar()).upper() not in ("0", "OFF")


def clock_offset_us(connection: Connection, now_us: Callable[[], int]) -> int:
    """Microseconds to add to this machine's clock to get the source's time."""
    before = now_us()
    at: Any = connection.execute(sa.select(database_now())).scalar()
    source_us = microseconds(at.replace(tzinfo=UTC))
    return source_us - (before + now_us()) // 2
