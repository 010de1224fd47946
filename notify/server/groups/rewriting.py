"""Replaces the content of a dead letter with a person's corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from notify.errors import InvalidRequest
from notify.protocol.message import EDITED
from notify.protocol.wire import JsonMessage, PackedMessage, Payload, decode_payload, encode_msgpack
from notify.server.core.admission import new_messages
from notify.storage.records import StoredMessage

BODY = ("body", "body_base64")


def rewritten(m: StoredMessage, changes: Mapping[str, Any], now_us: int) -> tuple[StoredMessage, list[str]]:
    """(the changed message, the names of the fields that differ). The message's header EDITED has these names, too.

    `changes`: `body` (text) or `body_base64`, `key`, `tag`, `headers`, within the bounds of any message; an empty key
    or tag removes it. The server's headers (notify-…) stay. Raises InvalidRequest, TooLarge.
    """
    before = decode_payload(m.payload)
    old_headers = before.headers or {}
    server_headers = {name: value for name, value in old_headers.items() if name.startswith("notify-")}
    user_headers = {name: value for name, value in old_headers.items() if name not in server_headers}
    body = {name: changes[name] for name in BODY if name in changes}
    rest: dict[str, Any] = {
        "key": changes.get("key", before.key) or None,
        "tag": changes.get("tag", before.tag) or None,
        "headers": changes.get("headers", user_headers),
    }
    edited: JsonMessage | PackedMessage = JsonMessage(topic=before.topic, **body, **rest)
    if not body:
        edited = PackedMessage(before.topic, body=before.body, **rest)
    (new,) = new_messages([edited], now_us, lambda _: True, lambda _: None)
    after = decode_payload(new.payload)
    pairs = {
        "body": (before.body, after.body),
        "key": (before.key, after.key),
        "tag": (before.tag, after.tag),
        "headers": (user_headers, after.headers or {}),
    }
    changed = [name for name, (was, will_be) in pairs.items() if was != will_be]
    if not changed:
        raise InvalidRequest("nothing differs from the letter: redrive it, or change its body, key, tag or headers")
    headers = (after.headers or {}) | server_headers | {EDITED: ", ".join(changed)}
    payload = encode_msgpack(Payload(before.topic, after.body, after.key, after.tag, headers, before.ttl))
    return msgspec.structs.replace(m, payload=payload), changed
