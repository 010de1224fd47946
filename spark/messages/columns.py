"""The columns of a message in Spark, and how they are made from a server's answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pyarrow as pa

from notify.protocol.wire import Delivered, microseconds

BASE = pa.schema(
    [
        ("id", pa.string()),
        ("topic", pa.string()),
        ("topic_number", pa.int32()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("committed_at", pa.timestamp("us", tz="UTC")),
        ("key", pa.string()),
        ("tag", pa.string()),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
    ]
)
TYPES = {
    "id": "string",
    "topic": "string",
    "topic_number": "int",
    "queue": "int",
    "offset": "bigint",
    "committed_at": "timestamp_ltz",  # an instant, also in a session that takes "timestamp" for a wall clock
    "key": "string",
    "tag": "string",
    "headers": "map<string, string>",
    "body": "binary",
}
"""BASE as Spark writes it."""
VALUE, RESCUED = "value", "rescued"


def types_of(fields: str) -> dict[str, str]:
    """The types of all columns, where JSON bodies have these `fields` in DDL; "" for bodies without a type."""
    return TYPES | {VALUE: f"struct<{fields}>", RESCUED: "string"} if fields else TYPES


def of_pulled(messages: Sequence[Delivered], number: int) -> pa.RecordBatch:
    """Rows of BASE; `number`: the topic's."""
    columns = [
        [m.id for m in messages],
        [m.topic for m in messages],
        [number] * len(messages),
        [m.queue for m in messages],
        [m.offset for m in messages],
        [microseconds(datetime.fromisoformat(m.committed_at)) for m in messages],
        [m.key for m in messages],
        [m.tag for m in messages],
        [list(m.headers.items()) if m.headers else None for m in messages],
        [m.body for m in messages],
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, BASE, strict=True)], schema=BASE
    )
