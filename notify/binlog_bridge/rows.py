"""Rows of both logs: the columns that a bridge reads, and transactions that came back."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from notify.protocol.wire import UNDECODABLE, BridgedTransaction

MOST_TABLES = 2000
"""The most definitions of tables that are kept: those of a thousand schemas."""
COLUMNS = (
    "transaction_id",
    "message_no",
    "producer_group",
    "topic",
    "key",
    "tag",
    "headers",
    "body",
    "delay",
    "deliver_at",
    "ttl",
    "relayed",
    "state",
)
"""The columns that a bridge reads."""
FAMILIES = dict.fromkeys(COLUMNS, "text") | {
    "message_no": "integer",
    "relayed": "integer",
    "delay": "float",
    "ttl": "float",
    "deliver_at": "datetime",
    "created_at": "datetime",
    "decided_at": "datetime",
}
"""The required kind of values of each column."""


class Returned(BridgedTransaction):
    """A transaction whose row is so old that the target may have had it once: see notify/movers/returned.py."""


class Logged(BridgedTransaction, dict=True):
    """A transaction that stands in the log only: its producer wrote no rows. Its attribute `home`, which is not sent,
    is the schema whose tables the producer uses."""

    home: ClassVar[str] = ""


def headers_of(text: bytes) -> object:
    """A row's headers, or the text itself if it is not JSON: every target refuses that, and the row is listed."""
    try:
        return msgspec.json.decode(text)
    except (*UNDECODABLE, ValueError):
        return text.decode("utf-8", "replace")
