"""A delayed record: when it is due and for which topic stand in its last two headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.kafka.records import DUE, TARGET, Headers, listed, number


def delayed_headers(headers: Headers, due_us: int, topic: str) -> Headers:
    """The headers of a message that waits until `due_us` (microseconds since 1970) for its topic."""
    return [*headers, (DUE, str(due_us).encode()), (TARGET, topic.encode())]


@dataclass(frozen=True, slots=True)
class Delayed:
    """A message that waits. `headers` are the message's, without those that say so."""

    topic: str
    due_us: int
    key: bytes | None
    value: bytes
    headers: Headers

    @property
    def size(self) -> int:
        """Its bytes, nearly."""
        return len(self.value) + sum([len(name) + len(text or b"") for name, text in self.headers]) + 64


def delayed_of(message: Any) -> Delayed | None:
    """A record of Kafka's client as a delayed message; None where it is none."""
    headers = listed(message)
    if len(headers) < 2 or (headers[-2][0], headers[-1][0]) != (DUE, TARGET):
        return None
    due_us, topic = number(headers[-2:], DUE), headers[-1][1]
    if due_us is None or not isinstance(topic, bytes):
        return None
    try:
        name = topic.decode()
    except UnicodeDecodeError:
        return None
    return Delayed(name, due_us, message.key(), message.value() or b"", headers[:-2])
