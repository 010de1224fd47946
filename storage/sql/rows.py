"""Rows of server_half_message from halves, and halves from rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from notify.protocol import ids
from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.storage.records import NewTransaction

_encode_headers = msgspec.json.Encoder().encode

UNDECIDED = ("PREPARED", "PARKED")


class Row(NamedTuple):
    """The values of a half's row, in the order of `COLUMNS`; the other columns are the same in each row."""

    transaction_id: str
    message_no: int
    producer_group: str
    state: str
    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    body: bytes
    delay: float | None
    deliver_at: str | None
    ttl: float | None
    created_at: str
    source: str
    instance: str
    next_check_us: int | None
    decided_at: str | None


COLUMNS = Row._fields
"""The columns with a value of each row."""
FIXED = {"mode": "half", "shards": "", "relayed": 0, "attempts": 0, "token": 0}
"""The columns that are the same in every new row."""


def text_of(time_us: int) -> str:
    """An instant as text for the databases: UTC, microseconds."""
    seconds, rest = divmod(time_us, 1_000_000)
    return f"{_second(seconds)}.{rest:06d}"


@lru_cache(64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment_of(time_us: int) -> datetime:
    """An instant for SQLAlchemy's DateTime."""
    return datetime.fromtimestamp(time_us // 1_000_000, UTC).replace(tzinfo=None, microsecond=time_us % 1_000_000)


def microseconds_of(value: Any) -> int:
    """Microseconds since 1970 of a database's instant (from SQLite text, else a naive UTC datetime); 0: NULL."""
    if value is None:
        return 0
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    whole = moment.replace(tzinfo=UTC, microsecond=0)
    return int(whole.timestamp()) * 1_000_000 + moment.microsecond


def rows_of(t: NewTransaction, now_us: int) -> list[Row]:
    """The rows of a half: one a message."""
    name = ids.to_text(t.id)
    at = text_of(now_us)
    state, decided = ("COMMITTED", at) if t.committed else ("PREPARED", None)
    next_us = None if t.committed else now_us + t.check_after_us
    rows = []
    number = 0
    for m in t.messages:
        p = m.content or decode_payload(m.payload)
        rows.append(
            Row(
                name,
                number,
                t.producer_group,
                state,
                p.topic,
                p.key,
                p.tag,
                _encode_headers(p.headers).decode() if p.headers else None,
                p.body,
                m.delay_us / 1_000_000 if m.delay_us else None,
                text_of(m.deliver_at_us) if m.deliver_at_us else None,
                p.ttl,
                at,
                t.source,
                t.instance,
                None if number else next_us,
                decided,
            )
        )
        number += 1
    return rows


def content_of(row: Any) -> Payload:
    """The message of a row (a mapping of columns)."""
    headers = row["headers"]
    return Payload(
        row["topic"],
        bytes(row["body"] or b""),
        row["key"],
        row["tag"],
        msgspec.json.decode(headers) if headers else None,
        row["ttl"],
    )


def payload_of(row: Any) -> bytes:
    """The canonical payload of a row."""
    return encode_msgpack(content_of(row))


def is_same(t: NewTransaction, stored: Sequence[Any]) -> bool:
    """Whether a transaction has the content of these rows (in message order)."""
    if len(stored) != len(t.messages) or stored[0]["producer_group"] != t.producer_group:
        return False
    if t.committed and stored[0]["state"] in UNDECIDED:
        return False
    for m, row in zip(t.messages, stored, strict=True):
        delay_us = round((row["delay"] or 0) * 1_000_000)
        if (delay_us, microseconds_of(row["deliver_at"])) != (m.delay_us, m.deliver_at_us):
            return False
        if content_of(row) != (m.content or decode_payload(m.payload)):
            return False
    return True
