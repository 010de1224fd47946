"""Rows that were written long ago, as a dump of an outbox brings them back."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.runtime.clock import wall_clock

DAYS = 86_400.0


def bring_back(engine: sa.Engine, topic: str, *, age_seconds: float, body: bytes = b"old", **fields: Any) -> str:
    """Insert a waiting row of so long ago; its id."""
    made_us = wall_clock() - round(age_seconds * 1e6)
    random = os.urandom(10)
    name = ids.to_text((made_us // 1000).to_bytes(6) + bytes((0x70,)) + random[:1] + bytes((0x80,)) + random[1:8])
    row = {
        "transaction_id": name, "message_no": 0, "producer_group": "g", "mode": "outbox", "state": "COMMITTED",
        "shards": "", "topic": topic, "key": "k", "body": body, "relayed": 0,
        "created_at": datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None) + timedelta(microseconds=made_us),
    }  # fmt: skip
    with engine.begin() as connection:
        connection.execute(half_message.insert().values(row | fields))
    return name
