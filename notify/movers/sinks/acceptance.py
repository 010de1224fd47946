"""Checks a transaction for a target without a Notify server: the same bounds that a queue server checks."""

from __future__ import annotations

from datetime import datetime

from notify.errors import InvalidRequest, NotifyError
from notify.protocol import ids
from notify.protocol.limits import (
    LIMITS,
    body_too_large,
    check_between,
    check_delay,
    check_headers,
    check_key,
    check_name,
)
from notify.protocol.wire import BridgedTransaction, Item, PackedMessage


def refusal(transaction: BridgedTransaction, now_us: int) -> Item | None:
    """The reason why every target refuses a transaction; None if the transaction keeps all bounds."""
    try:
        _check(transaction, now_us)
    except NotifyError as error:
        return refused(transaction, error)
    return None


def refused(transaction: BridgedTransaction, error: NotifyError) -> Item:
    """The item of a transaction that is refused because of an error."""
    return Item(transaction.id, error.status, code=error.code, detail=str(error))


def _check(transaction: BridgedTransaction, now_us: int) -> None:
    ids.from_text(transaction.id)
    if not 0 < len(transaction.messages) <= LIMITS.messages_per_transaction:
        raise InvalidRequest(f"a transaction carries 1 to {LIMITS.messages_per_transaction} messages")
    if transaction.producer_group:
        check_name("producer_group", transaction.producer_group)
    for message in transaction.messages:
        _check_message(message, now_us)


def _check_message(message: PackedMessage, now_us: int) -> None:
    check_name("topic", message.topic)
    if len(message.body or b"") > LIMITS.message_bytes:
        raise body_too_large(len(message.body or b""))
    # A mover reads headers from a row, where they may be any JSON.
    headers: object = message.headers
    if headers is not None:
        if not isinstance(headers, dict) or not all(isinstance(text, str) for pair in headers.items() for text in pair):
            raise InvalidRequest("headers are texts by name", "invalid_headers")
        check_headers(headers)
    if message.key is not None:
        check_key(message.key)
    if message.tag is not None:
        check_name("tag", message.tag)
    deliver_at: object = message.deliver_at
    if deliver_at is not None and not isinstance(deliver_at, datetime):
        raise InvalidRequest("deliver_at is not a time", "invalid_deliver_at")
    if message.delay is not None or message.deliver_at is not None:
        check_delay(message.delay, message.deliver_at, now_us)
    if message.ttl is not None:
        check_between("ttl", message.ttl, LIMITS.ttl_min_seconds, LIMITS.ttl_seconds)
