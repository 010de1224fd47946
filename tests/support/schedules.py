"""The messages of schedules, as a database of servers has them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from notify.storage.sql.engines import opened
from notify.storage.sql.tables import server_half_message as half


def stored(storage: str) -> list[dict[str, Any]]:
    """The messages of schedules in a database of servers."""
    with opened(storage) as engine, engine.connect() as connection:
        rows = connection.execute(sa.select(half.c.transaction_id, half.c.headers)).all()
    return [{"id": row.transaction_id, "headers": json.loads(row.headers)} for row in rows]


def each_second(rows: list[dict[str, Any]]) -> None:
    """Check that there is one message for each second from the first to the last."""
    seconds = sorted(datetime.fromisoformat(row["headers"]["notify-scheduled-for"]) for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert seconds == [seconds[0] + timedelta(seconds=n) for n in range(len(seconds))]
