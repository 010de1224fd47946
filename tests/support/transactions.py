"""Transactions as tests send them: to a store, and over HTTP."""

from __future__ import annotations

from typing import Any

from notify import ids
from notify.wire import Payload, encode_msgpack
from storage.store import NewMessage, NewTransaction


def new_id() -> str:
    """A fresh transaction id as text."""
    return ids.to_text(ids.new_id())


def message(body: bytes = b"x", topic: str = "t", *, key: str | None = None, **options: Any) -> NewMessage:
    """A message with a payload as the server makes it: a database keeps its parts in columns."""
    return NewMessage(topic, encode_msgpack(Payload(topic, body, key)), key, **options)


def sent(
    body: bytes = b"x", *, topic: str = "t", group: str = "g", key: str | None = None, **options: Any
) -> NewTransaction:
    """A half of one message."""
    return NewTransaction(ids.new_id(), group, [message(body, topic, key=key)], **options)


def half_request(group: str = "g", transaction_id: str | None = None, **message: Any) -> dict[str, Any]:
    """The body of `POST /v1/transactions` for one half of one message, whose fields the call may replace."""
    fields = {"topic": "t", "body": "x"} | message
    return {"producer_group": group, "transactions": [{"id": transaction_id or new_id(), "messages": [fields]}]}
