"""Dead letters: a message that is not retried any more, with headers that say where it comes from and why."""

from __future__ import annotations

from notify.protocol.message import DEAD_LETTER_REASON, REPLAY
from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.storage.records import StoredMessage


def dead_payload(group: str, message: StoredMessage, attempts: int, reason: str, replay: int, deaths: int = 0) -> bytes:
    """The payload of a group's dead letter. `attempts`: all attempts at it, of which `deaths` ended with a lease that
    ran out. `replay`: which run of the topic's messages it is for an inbox, or 0."""
    payload = decode_payload(message.payload)
    headers = dict(payload.headers or {})
    headers["notify-dead-letter-group"] = group
    headers["notify-dead-letter-topic"] = payload.topic
    headers["notify-dead-letter-queue"] = str(message.queue)
    headers["notify-dead-letter-offset"] = str(message.offset)
    headers["notify-dead-letter-attempts"] = str(attempts)
    headers["notify-dead-letter-deaths"] = str(deaths)
    headers[DEAD_LETTER_REASON] = reason[:500]
    if replay:
        headers[REPLAY] = str(replay)
    return encode_msgpack(Payload(payload.topic, payload.body, payload.key, payload.tag, headers))
