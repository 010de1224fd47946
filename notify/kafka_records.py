"""A message as a Kafka record: what any Kafka client, or Spark, may read. docs/reference/kafka.md describes it.

| record | message |
|---|---|
| topic, key, value | topic, key (UTF-8, null where there is none), body |
| header `notify-id` | message id, `{transaction}.{n}` |
| header `notify-group` | producer group |
| header `notify-tag` | tag, where there is one |
| header `notify-expires` | when it expires, microseconds since 1970, where it has a ttl |
| every other header | the message's own, UTF-8 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.wire import BridgedTransaction, PackedMessage, microseconds

SCHEME = "kafka://"
ID, GROUP, TAG, EXPIRES = "notify-id", "notify-group", "notify-tag", "notify-expires"
ATTEMPT, DUE, TARGET, REASON = "notify-attempt", "notify-due", "notify-topic", "notify-reason"
OWN = "notify-"
"""Headers that begin so are not the message's."""

POSITIONS = "notify-bridge-positions"
"""Compacted: by source the position behind what was published, written in the same Kafka transaction."""
DELAYED = "notify-delayed"
"""Compacted: by message id what waits for its time; a tombstone goes with its release."""
RETRY_SECONDS = (1, 5, 30, 300)
"""One retry topic for each wait: in one with equal waits the first is always due first."""

Headers = list[tuple[str, str | bytes | None]]


def brokers_of(url: str) -> str:
    """`kafka://a:9092,b:9092` without its scheme."""
    return url.removeprefix(SCHEME).rstrip("/")


def retry_topic(group: str, seconds: int) -> str:
    return f"retry.{group}.{seconds}s"


def dead_letter_topic(group: str) -> str:
    return f"dead-letter.{group}"


def headers_of(t: BridgedTransaction, number: int, m: PackedMessage, now_us: int) -> Headers:
    """The headers of a transaction's message."""
    headers: Headers = [(ID, f"{t.id}.{number}".encode()), (GROUP, t.producer_group.encode())]
    if m.tag is not None:
        headers.append((TAG, m.tag.encode()))
    if m.ttl is not None:
        headers.append((EXPIRES, str(max(now_us, due_us(m, now_us)) + round(m.ttl * 1_000_000)).encode()))
    headers += [(name, value.encode()) for name, value in (m.headers or {}).items()]
    return headers


def due_us(m: PackedMessage, now_us: int) -> int:
    """When a message is to be delivered, 0 for at once."""
    if m.delay:
        return now_us + round(m.delay * 1_000_000)
    at = microseconds(m.deliver_at) if m.deliver_at is not None else 0
    return at if at > now_us else 0


def listed(message: Any) -> Headers:
    """The headers of a Kafka client's message."""
    found = message.headers() or []
    return list(found.items()) if isinstance(found, dict) else list(found)


def header(headers: Sequence[tuple[str, str | bytes | None]] | None, name: str) -> str | None:
    """A header's text, None where it is missing."""
    for found, value in headers or ():
        if found == name and value is not None:
            return value.decode() if isinstance(value, bytes) else value
    return None


def own_headers(headers: Sequence[tuple[str, str | bytes | None]] | None) -> dict[str, str]:
    """The message's own headers."""
    return {
        name: value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        for name, value in headers or ()
        if not name.startswith(OWN) and value is not None
    }
