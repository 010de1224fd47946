"""Captures, in tests of Django projects, the messages that the transaction of a TestCase would send.

Django's TestCase wraps each test in a transaction that is rolled back, so that no message is ever sent:

    with captured_messages() as messages:
        self.client.post("/orders", {"item": "book"})
    assert [message.json() for message in messages] == [{"item": "book"}]

In a TransactionTestCase transactions do commit; look for their messages in a `notify.testing.InMemoryServer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from django.db import DEFAULT_DB_ALIAS, connections

from notify.client.bodies.sending import as_given
from notify.client.django.transactions import listener_of
from notify.client.producer.packing import give_key


@dataclass(frozen=True, slots=True)
class Captured:
    """A message that would be sent with the transaction's commit. `delay` and `ttl` are in seconds; the body is as its
    handlers would get it, also if the producer compresses or stores it."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    headers: dict[str, str]
    delay: float | None
    deliver_at: datetime | None
    ttl: float | None

    @property
    def text(self) -> str:
        """The body as UTF-8 text."""
        return self.body.decode()

    def json(self) -> Any:
        """The body as a JSON value."""
        return msgspec.json.decode(self.body)


@contextlib.contextmanager
def captured_messages(using: str = DEFAULT_DB_ALIAS, *, execute: bool = False) -> Iterator[list[Captured]]:
    """The messages that were sent in the block and not rolled back with a savepoint; the list is filled at the end.

    Django's `captureOnCommitCallbacks` does the same for callbacks. With `execute`, the messages are sent to the server
    at the end of the block as if the transaction had committed: consumers receive them even if the test's transaction
    is rolled back. They get other ids than `send` returned.
    """
    listener = listener_of(connections[using])
    before = len(listener.sends()[1])
    captured: list[Captured] = []
    yield captured
    half_sender, sends = listener.sends()
    new = sends[before:]
    for packed, late in new:
        if late is not None:
            give_key(packed, late)
        body, headers = as_given(packed)
        times = packed.delay, packed.deliver_at, packed.ttl
        captured.append(Captured(packed.topic, body, packed.key, packed.tag, headers, *times))
    if execute and new and half_sender is not None:
        half_sender.deliver([packed for packed, _ in new])
