"""A message as a Kafka record, which any Kafka client and Spark can read. docs/distributed.md has this table, too.

| record | message |
|---|---|
| topic, key, value | topic, key (UTF-8, or null), body |
| header `notify-id` | message id, `{transaction}.{n}` |
| header `notify-group` | producer group |
| header `notify-tag` | tag, if there is one |
| header `notify-expires` | when the message expires, in microseconds since 1970, if it has a ttl |
| every other header | the message's own, UTF-8; one whose name begins with `notify-` has `notify-own-` before it |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.message import DEAD_LETTER_REASON
from notify.wire import BridgedTransaction, PackedMessage, microseconds

SCHEME = "kafka://"
ID, GROUP, TAG, EXPIRES = "notify-id", "notify-group", "notify-tag", "notify-expires"
ATTEMPT, DUE, TARGET, REASON = "notify-attempt", "notify-due", "notify-topic", "notify-reason"
OWN = "notify-"
"""Headers with this prefix are Notify's, not the message's own."""
ESCAPED = "notify-own-"
"""Stands before the name of a message's own header that begins like Notify's, so that none is taken for the other."""

POSITIONS = "notify-bridge-positions"
"""Topics that begin so hold how far each source is published (positions.py)."""
DELAYED = "notify-delayed"
"""A compacted topic: delayed messages by id; the release of a message writes a tombstone."""
Headers = list[tuple[str, str | bytes | None]]


def headers_of(t: BridgedTransaction, number: int, m: PackedMessage, now_us: int) -> Headers:
    """The headers of a transaction's message."""
    headers: Headers = [(ID, f"{t.id}.{number}".encode()), (GROUP, t.producer_group.encode())]
    if m.tag is not None:
        headers.append((TAG, m.tag.encode()))
    if m.ttl is not None:
        headers.append((EXPIRES, str(max(now_us, due_us(m, now_us)) + round(m.ttl * 1_000_000)).encode()))
    headers += [
        (ESCAPED + name if name.startswith(OWN) else name, value.encode()) for name, value in (m.headers or {}).items()
    ]
    return headers


def due_us(m: PackedMessage, now_us: int) -> int:
    """When a message is due, in microseconds since 1970; 0: at once."""
    if m.delay:
        return now_us + round(m.delay * 1_000_000)
    at = microseconds(m.deliver_at) if m.deliver_at is not None else 0
    return at if at > now_us else 0


def listed(message: Any) -> Headers:
    """The headers of a message of the Kafka client."""
    headers = message.headers() or []
    return list(headers.items()) if isinstance(headers, dict) else list(headers)


def header(headers: Sequence[tuple[str, str | bytes | None]] | None, name: str) -> str | None:
    """The text of a header; None if it is missing."""
    for header_name, value in headers or ():
        if header_name == name and value is not None:
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return None


def number(headers: Sequence[tuple[str, str | bytes | None]] | None, name: str) -> int | None:
    """The whole number of a header; None if it is missing or none, as in a record of somebody else's."""
    text = header(headers, name)
    return int(text) if text is not None and len(text) < 20 and text.isascii() and text.isdigit() else None


def why_dead(headers: Sequence[tuple[str, str | bytes | None]] | None) -> dict[str, str]:
    """Why a record of a dead-letter topic is there, in headers named as those of a queue server's dead letters."""
    said = {
        "notify-dead-letter-topic": header(headers, TARGET),
        "notify-dead-letter-attempts": header(headers, ATTEMPT),
        DEAD_LETTER_REASON: header(headers, REASON),
    }
    return {name: text for name, text in said.items() if text is not None}


def own_headers(headers: Sequence[tuple[str, str | bytes | None]] | None) -> dict[str, str]:
    """The message's own headers."""
    return {
        name.removeprefix(ESCAPED): value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        for name, value in headers or ()
        if value is not None and (name.startswith(ESCAPED) or not name.startswith(OWN))
    }
