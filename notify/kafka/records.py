"""The form of a message as a Kafka record, which any Kafka client and Spark can read. The same table is in
docs/kafka.md.

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

from notify.protocol.limits import digits
from notify.protocol.message import DEAD_LETTER_REASON
from notify.protocol.wire import BridgedTransaction, PackedMessage, microseconds

SCHEME = "kafka://"
ID, GROUP, TAG, EXPIRES = "notify-id", "notify-group", "notify-tag", "notify-expires"
ATTEMPT, DUE, TARGET, REASON = "notify-attempt", "notify-due", "notify-topic", "notify-reason"
OWN = "notify-"
"""Headers with this prefix are Notify's, not the message's own."""
ESCAPED = "notify-own-"
"""The prefix for a message's own header whose name begins like Notify's, so that the two are not confused."""

POSITIONS = "notify-bridge-positions"
"""The prefix of the topics with each source's position (positions.py)."""
DELAYED = "notify-delayed"
"""The prefix of the topics with delayed messages (movers/sinks/delays)."""
Headers = list[tuple[str, str | bytes | None]]


def headers_of(transaction: BridgedTransaction, number: int, message: PackedMessage, now_us: int) -> Headers:
    """The headers of the record for message `number` of a transaction."""
    headers: Headers = [
        (ID, f"{transaction.id}.{number}".encode()),
        (GROUP, transaction.producer_group.encode()),
    ]
    if message.tag is not None:
        headers.append((TAG, message.tag.encode()))
    if message.ttl is not None:
        expires_us = max(now_us, due_us(message, now_us)) + round(message.ttl * 1_000_000)
        headers.append((EXPIRES, str(expires_us).encode()))
    headers += [
        (ESCAPED + name if name.startswith(OWN) else name, value.encode())
        for name, value in (message.headers or {}).items()
    ]
    return headers


def due_us(message: PackedMessage, now_us: int) -> int:
    """When a message is due, in microseconds since 1970; 0: immediately."""
    if message.delay:
        return now_us + round(message.delay * 1_000_000)
    at_us = microseconds(message.deliver_at) if message.deliver_at is not None else 0
    return at_us if at_us > now_us else 0


def listed(message: Any) -> Headers:
    """The headers of a message of the Kafka client."""
    headers = message.headers() or []
    return list(headers.items()) if isinstance(headers, dict) else list(headers)


def header(headers: Sequence[tuple[str, str | bytes | None]] | None, name: str) -> str | None:
    """The text of a header; None if it is missing."""
    for header_name, value in headers or ():
        if header_name == name and value is not None:
            return text_of(value)
    return None


def number(headers: Sequence[tuple[str, str | bytes | None]] | None, name: str) -> int | None:
    """The whole number in a header; None if the header is missing or not a number, as in another tool's record."""
    text = header(headers, name)
    return digits(text) if text is not None else None


def why_dead(headers: Sequence[tuple[str, str | bytes | None]] | None) -> dict[str, str]:
    """The reason for a record of a dead-letter topic, in headers named as those of a queue server's dead letters."""
    fields = {
        "notify-dead-letter-topic": header(headers, TARGET),
        "notify-dead-letter-attempts": header(headers, ATTEMPT),
        DEAD_LETTER_REASON: header(headers, REASON),
    }
    return {name: text for name, text in fields.items() if text is not None}


def split(message: Any) -> tuple[dict[str, str | bytes], dict[str, str] | None]:
    """Notify's headers of a message of the Kafka client by name, the first of each name; and the message's own headers,
    None if it has none."""
    fields: dict[str, str | bytes] = {}
    own: dict[str, str] | None = None
    headers = message.headers() or ()
    for name, value in headers.items() if isinstance(headers, dict) else headers:
        if value is None:
            continue
        if name.startswith(OWN):
            if name not in fields:
                fields[name] = value
            if not name.startswith(ESCAPED):
                continue
            name = name.removeprefix(ESCAPED)
        if own is None:
            own = {}
        own[name] = text_of(value)
    return fields, own


def text_of(value: str | bytes) -> str:
    """The text of a header's value."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def own_headers(headers: Sequence[tuple[str, str | bytes | None]] | None) -> dict[str, str]:
    """The message's own headers."""
    return {
        name.removeprefix(ESCAPED): text_of(value)
        for name, value in headers or ()
        if value is not None and (name.startswith(ESCAPED) or not name.startswith(OWN))
    }
