"""Whether a target without a server in front of it takes a transaction: the bounds that a queue server would check."""

from __future__ import annotations

from datetime import datetime

from notify import ids
from notify.errors import InvalidRequest, NotifyError, TooLarge
from notify.limits import LIMITS, check_between, check_delay, check_headers, check_key, check_name
from notify.wire import BridgedTransaction, Item, PackedMessage


def refusal(t: BridgedTransaction, now_us: int) -> Item | None:
    """Why no target ever takes a transaction; None if nothing in it is beyond the bounds."""
    try:
        _check(t, now_us)
    except NotifyError as error:
        return refused(t, error)
    return None


def refused(t: BridgedTransaction, error: NotifyError) -> Item:
    """The item of a transaction that an error refuses."""
    return Item(t.id, error.status, code=error.code, detail=str(error))


def _check(t: BridgedTransaction, now_us: int) -> None:
    ids.from_text(t.id)
    if not 0 < len(t.messages) <= LIMITS.messages_per_transaction:
        raise InvalidRequest(f"a transaction carries 1 to {LIMITS.messages_per_transaction} messages")
    if t.producer_group:
        check_name("producer_group", t.producer_group)
    for m in t.messages:
        _check_message(m, now_us)


def _check_message(m: PackedMessage, now_us: int) -> None:
    check_name("topic", m.topic)
    size = len(m.body or b"")
    if size > LIMITS.message_bytes:
        raise TooLarge(f"the body has {size} bytes; at most {LIMITS.message_bytes} are allowed")
    # A mover has them from a row as whatever JSON stood there.
    headers: object = m.headers
    if headers is not None:
        if not isinstance(headers, dict) or not all(isinstance(text, str) for pair in headers.items() for text in pair):
            raise InvalidRequest("headers are texts by name", "invalid_headers")
        check_headers(headers)
    if m.key is not None:
        check_key(m.key)
    if m.tag is not None:
        check_name("tag", m.tag)
    deliver_at: object = m.deliver_at
    if deliver_at is not None and not isinstance(deliver_at, datetime):
        raise InvalidRequest("deliver_at is no time", "invalid_deliver_at")
    if m.delay is not None or m.deliver_at is not None:
        check_delay(m.delay, m.deliver_at, now_us)
    if m.ttl is not None:
        check_between("ttl", m.ttl, LIMITS.ttl_min_seconds, LIMITS.ttl_seconds)
