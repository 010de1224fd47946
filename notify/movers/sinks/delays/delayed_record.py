"""A delayed record: its last two headers have the time when it is due, and its topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.kafka.records import DUE, TARGET, Headers, listed, number


def delayed_headers(headers: Headers, due_us: int, topic: str) -> Headers:
    """The headers of a message that waits until `due_us` (microseconds since 1970) for its topic."""
    return [*headers, (DUE, str(due_us).encode()), (TARGET, topic.encode())]


@dataclass(frozen=True, slots=True)
class Delayed:
    """A message that waits. `headers`: the message's headers, without the two for the delay."""

    topic: str
    due_us: int
    key: bytes | None
    value: bytes
    headers: Headers

    @property
    def size(self) -> int:
        """Its approximate size, in bytes."""
        return len(self.value) + sum([len(name) + len(text or b"") for name, text in self.headers]) + 64


def delayed_of(message: Any) -> Delayed | None:
    """The delayed message in a record of Kafka's client; None if the record is not a delayed message."""
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
