"""Encodes messages and checks for answers, in msgpack and in JSON."""

from __future__ import annotations

from typing import Any

from notify.protocol import ids
from notify.protocol.wire import (
    DeliveryHead,
    Payload,
    ReplayedHead,
    array_head,
    body_fields,
    decode_payload,
    encode_msgpack,
    instant,
)
from notify.runtime import tracing
from notify.server.delivery.leases import Handed
from notify.storage.message_run import RUN_FIELDS, encoded_messages
from notify.storage.records import StoredMessage

_MAP_HEADS = [bytes((n,)) for n in range(256)]


def packed_deliveries(handed: list[Handed]) -> bytes:
    """{"messages": […]} in msgpack. Each stored payload, a map, is copied, with the fields of a head added."""
    chunks = [b"\x81\xa8messages", array_head(sum([len(h.messages) for h in handed]))]
    last_us, at = -1, ""
    for h in handed:
        token, attempts = h.token, h.attempts
        for number, m in enumerate(h.messages):
            receipt, attempt = f"{token}{number}", 1 if attempts is None else attempts[number]
            if m.committed_us != last_us:
                last_us, at = m.committed_us, instant(m.committed_us)
            payload = m.payload
            name = ids.message_id(m.transaction_id, m.message_no)
            if h.replay:
                head = encode_msgpack(ReplayedHead(receipt, name, m.queue, m.offset, attempt, at, h.replay))
            else:
                head = encode_msgpack(DeliveryHead(receipt, name, m.queue, m.offset, attempt, at))
            # Both maps have fewer than 16 fields, so that their heads are one byte each.
            chunks += (_MAP_HEADS[payload[0] + head[0] - 0x80], head[1:], payload[1:])
    return b"".join(chunks)


def packed_runs(handed: list[Handed]) -> list[bytes]:
    """{"messages": [], "runs": […]} in msgpack, in parts; see `DeliveredRun` in notify/protocol/wire.py."""
    parts = [b"\x82\xa8messages\x90\xa4runs" + array_head(len(handed))]
    for h in handed:
        fields: dict[str, Any] = {"lease": h.token[:-1]}
        if h.attempts is not None:
            fields["attempts"] = h.attempts
        if h.replay:
            fields["replay"] = h.replay
        # Both maps have fewer than 16 fields, so that their heads are one byte each.
        parts.append(_MAP_HEADS[0x80 + len(fields) + RUN_FIELDS] + encode_msgpack(fields)[1:])
        parts.append(encoded_messages(h.messages) if h.run is None else h.run.encoded)
    return parts


def packed_pulled(messages: list[StoredMessage], next_offset: int, topic_number: int) -> bytes:
    """{"messages": […], "next_offset", "topic_number"} in msgpack, with the stored payloads copied."""
    chunks = [b"\x83\xa8messages", array_head(len(messages))]
    for m in messages:
        fields = {
            "id": ids.message_id(m.transaction_id, m.message_no),
            "queue": m.queue,
            "offset": m.offset,
            "committed_at": instant(m.committed_us),
        }
        chunks += (_MAP_HEADS[m.payload[0] + 4], encode_msgpack(fields)[1:], m.payload[1:])
    chunks += (encode_msgpack("next_offset"), encode_msgpack(next_offset))
    chunks += (encode_msgpack("topic_number"), encode_msgpack(topic_number))
    return b"".join(chunks)


def _json_message(payload: Payload) -> dict[str, Any]:
    fields: dict[str, Any] = {"topic": payload.topic}
    if payload.key is not None:
        fields["key"] = payload.key
    if payload.tag is not None:
        fields["tag"] = payload.tag
    fields["headers"] = payload.headers or {}
    return fields | body_fields(payload.body)


def trace(group: str, handed: list[Handed], now_us: int) -> None:
    """Add a span from commit to now to the trace of each message that was handed out."""
    for h in handed:
        for _, m, attempt in h.each():
            p = decode_payload(m.payload)
            attributes: dict[str, str | int] = {"consumer.group.name": group, "notify.attempt": attempt}
            tracing.record("deliver", m.topic, p.headers, m.committed_us, now_us, **attributes)


def json_check(check: dict[str, Any]) -> dict[str, Any]:
    """A check of a poll with its messages in JSON's types."""
    return check | {"messages": [_json_message(m) for m in check["messages"]]}


def json_pulled(m: StoredMessage) -> dict[str, Any]:
    """A pulled message in JSON's types."""
    return {
        "id": ids.message_id(m.transaction_id, m.message_no),
        "queue": m.queue,
        "offset": m.offset,
        "committed_at": instant(m.committed_us),
        **_json_message(decode_payload(m.payload)),
    }


def json_deliveries(handed: list[Handed]) -> list[dict[str, Any]]:
    """Messages that were handed out, in JSON's types."""
    return [
        {"receipt": receipt, "attempt": attempt, **json_pulled(message), **({"replay": h.replay} if h.replay else {})}
        for h in handed
        for receipt, message, attempt in h.each()
    ]
