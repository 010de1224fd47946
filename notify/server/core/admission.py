"""Admission: each message of a request is checked against its bounds, and turned into what the storage takes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence

from notify.errors import InvalidRequest, NotifyError, WrongShard
from notify.protocol.keys import shard_of_key
from notify.protocol.limits import (
    LIMITS,
    body_too_large,
    check_between,
    check_delay,
    check_headers,
    check_key,
    check_name,
)
from notify.protocol.wire import Item, JsonMessage, PackedMessage, Payload, encode_msgpack
from notify.protocol.withdrawal import OWN, check_own
from notify.server.access.principal import Principal
from notify.server.core.flow import retry_after
from notify.storage.records import NewMessage


def check_sender(sender: Principal | None, messages: Iterable[JsonMessage | PackedMessage]) -> None:
    """Raises Forbidden unless `sender` may publish to each topic; None: no right is checked. This comes before all
    other work on the messages, such as on their keys."""
    if sender is not None:
        for m in messages:
            sender.check("publish", m.topic)


def new_messages(
    messages: Iterable[JsonMessage | PackedMessage],
    now_us: int,
    has_topic: Callable[[str], bool],
    make_topic: Callable[[str], object],
) -> list[NewMessage]:
    """The messages as the storage takes them. `make_topic` is called for each topic that does not exist.

    Raises InvalidRequest, TooLarge, and what `make_topic` raises.
    """
    new = []
    for m in messages:
        topic = m.topic
        if not has_topic(topic):
            make_topic(topic)
        new.append(_new_message(m, now_us))
    return new


def _new_message(m: JsonMessage | PackedMessage, now_us: int) -> NewMessage:
    """One message as the storage takes it, its payload encoded. Raises InvalidRequest, TooLarge."""
    body = m.body
    if body is None or m.body_base64 is not None:
        body = _decoded_body(m)
    elif isinstance(body, str):
        body = body.encode()
    if len(body) > LIMITS.message_bytes:
        raise body_too_large(len(body))
    headers, key, tag = m.headers, m.key, m.tag
    acts = None
    if headers:
        check_headers(headers)
        if not OWN.isdisjoint(headers):
            acts = check_own(m.topic, headers, body, m.delay, m.deliver_at, m.ttl)
    if key is not None and 4 * len(key) > LIMITS.key_bytes:  # a character has at most four bytes; shorter keys fit
        check_key(key)
    if tag is not None:
        check_name("tag", tag)
    delay_us = deliver_at_us = ttl_us = 0
    if m.delay is not None or m.deliver_at is not None:
        delay_us, deliver_at_us = check_delay(m.delay, m.deliver_at, now_us)
    if m.ttl is not None:
        check_between("ttl", m.ttl, LIMITS.ttl_min_seconds, LIMITS.ttl_seconds)
        ttl_us = round(m.ttl * 1_000_000)
    content = Payload(m.topic, body, key, tag, headers or None, m.ttl)
    return NewMessage(m.topic, encode_msgpack(content), key, tag, delay_us, deliver_at_us, ttl_us, content, acts)


def _decoded_body(m: JsonMessage | PackedMessage) -> bytes:
    """The bytes of `body_base64`. Raises InvalidRequest if it is missing or malformed, or if there is a `body` too."""
    if m.body_base64 is None:
        raise InvalidRequest("a message needs a body (it may be empty) or body_base64", "invalid_body")
    if m.body is not None:
        raise InvalidRequest("give body or body_base64, not both", "invalid_body")
    try:
        return base64.b64decode(m.body_base64, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("body_base64 is not base64", "invalid_body") from None


def check_place(messages: Iterable[JsonMessage | PackedMessage], shard: str, key_shards: Sequence[str]) -> None:
    """Raises WrongShard if the first key among the messages of one transaction belongs to another shard."""
    for m in messages:
        if m.key is not None:
            owner = shard_of_key(m.key, key_shards)
            if owner != shard:
                raise WrongShard(
                    f"key {m.key[:40]!r} belongs to shard {owner!r}, and this is {shard!r}: GET /v1/members says where "
                    "each is; send it there",
                    shard=owner,
                )
            return


def keys_of(messages: Iterable[JsonMessage | PackedMessage]) -> set[tuple[str, str | None]]:
    """(topic, key) of each message that has a key; messages with the same pair are delivered in order."""
    return {(m.topic, m.key) for m in messages if m.key is not None}


def failed(item_id: str, error: NotifyError, state: str | None = None) -> Item:
    """The answer's item for one that `error` refuses."""
    shard = error.shard if isinstance(error, WrongShard) else None
    return Item(item_id, error.status, state, shard, None, error.code, str(error), retry_after(error))
