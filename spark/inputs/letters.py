"""The dead letters of a segment: their groups, their reasons, and the ids under which they are sent again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from notify.protocol.message import DEAD_LETTER_REASON
from notify.protocol.wire import UNDECODABLE, decode_payload
from notify.storage.log.entry import Entry
from notify.storage.names import dead_letter_topic, redriven_id

LETTERS = pa.schema(
    [
        ("id", pa.binary()),
        ("no", pa.int32()),
        ("group", pa.string()),
        ("reason", pa.string()),
        ("name", pa.string()),  # of the topic that the message was in
        ("topic", pa.int64()),  # number of the group's dead-letter topic
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("at_us", pa.int64()),
        ("again", pa.binary()),  # the transaction id of the message that is sent again
    ]
)
REASON_CHARACTERS = 200
_GROUP, _TOPIC = "notify-dead-letter-group", "notify-dead-letter-topic"


def letter_of(entry: Entry, payload: bytes) -> dict[str, Any] | None:
    """The row of a dead letter in LETTERS; None if its payload cannot be read."""
    try:
        message = decode_payload(payload)
    except UNDECODABLE:
        return None
    headers = message.headers or {}
    group = headers.get(_GROUP, "")
    return {
        "id": entry.transaction_id,
        "no": entry.message_no,
        "group": group,
        "reason": headers.get(DEAD_LETTER_REASON, "")[:REASON_CHARACTERS],
        "name": headers.get(_TOPIC, message.topic),
        "topic": entry.topic,
        "queue": entry.queue,
        "offset": entry.offset,
        "at_us": entry.time_us,
        "again": redriven_id(dead_letter_topic(group), entry.transaction_id, entry.offset),
    }
