"""Transactions as tests send them: to a store, and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from notify.check import CheckUnavailable, Outcome
from notify.protocol import ids
from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.storage.records import NewMessage, NewTransaction, StoredMessage
from tests.support.clock import eventually


def new_id() -> str:
    """A new transaction id as text."""
    return ids.to_text(ids.new_id())


def message(
    body: bytes = b"x", topic: str = "t", *, key: str | None = None, tag: str | None = None, **options: Any
) -> NewMessage:
    """A message with a payload in the server's encoding, because a database stores its parts in columns."""
    return NewMessage(topic, encode_msgpack(Payload(topic, body, key, tag)), key, tag, **options)


def content(body: bytes = b"x", topic: str = "t") -> Payload:
    """The content of a message without key and tag."""
    return Payload(topic, body)


def sent(
    body: bytes = b"x", *, topic: str = "t", group: str = "g", key: str | None = None, tag: str | None = None,
    delay_us: int = 0, deliver_at_us: int = 0, **options: Any,
) -> NewTransaction:  # fmt: skip
    """A half of one message; `options` are fields of the transaction."""
    new_message = message(body, topic, key=key, tag=tag, delay_us=delay_us, deliver_at_us=deliver_at_us)
    return NewTransaction(ids.new_id(), group, [new_message], **options)


def bodies_in(messages: Iterable[StoredMessage]) -> list[bytes]:
    """The bodies of messages that a storage has read."""
    return [decode_payload(m.payload).body for m in messages]


def half_request(group: str = "g", transaction_id: str | None = None, **message: Any) -> dict[str, Any]:
    """The body of `POST /v1/transactions` for a half of one message, whose fields the caller may replace."""
    fields = {"topic": "t", "body": "x"} | message
    return {"producer_group": group, "transactions": [{"id": transaction_id or new_id(), "messages": [fields]}]}


def when_free(check: Callable[[], Outcome]) -> Outcome:
    """The answer to a check of a user who sees all schemas of MySQL: another test may have locked one of its own."""

    def asked() -> Outcome | None:
        try:
            return check()
        except CheckUnavailable as error:
            if "locked at the moment" not in str(error):
                raise
            return None

    return eventually(asked, "all schemas to be free") or Outcome.UNKNOWN
