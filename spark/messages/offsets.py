"""Offsets of topics: how far each queue is read. Spark keeps them in a query's checkpoint, as JSON.

    {"orders": {"number": 3, "next": {"0": 120, "1": 97}, "known": {"0": 100, "1": 90}}}

`number` is the topic's: another one once it is deleted and made again. `next` has each queue's next offset to read.
Below `known`, which is where the queues ended when the query began, offsets may be missing because retention left them
out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.limits import digits

Offsets = dict[str, "TopicOffsets"]
MOST_QUEUES = 1 << 16


@dataclass(frozen=True)
class TopicOffsets:
    """How far one topic is read."""

    number: int
    """0: not known."""
    next: Mapping[int, int]
    known: Mapping[int, int] = field(default_factory=dict)


def to_json(offsets: Offsets) -> dict[str, Any]:
    """The offsets as Spark keeps them; equal offsets have equal text."""
    return {
        topic: {"number": each.number, "next": _texts(each.next), "known": _texts(each.known)}
        for topic, each in sorted(offsets.items())
    }


def _texts(queues: Mapping[int, int]) -> dict[str, int]:
    return {str(queue): offset for queue, offset in sorted(queues.items())}


def from_json(value: Any) -> Offsets:
    """The offsets that `to_json` wrote, or that a person did: {"orders": {"0": 120}}. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise _malformed(value)
    offsets: Offsets = {}
    for topic, given in value.items():
        if not isinstance(given, dict):
            raise _malformed(given)
        if "next" not in given:
            given = {"next": given}
        if set(given) - {"number", "next", "known"}:
            raise _malformed(given)
        number = given.get("number", 0)
        if not isinstance(number, int):
            raise _malformed(given)
        offsets[topic] = TopicOffsets(number, _queues(given["next"]), _queues(given.get("known", {})))
    return offsets


def from_text(text: str) -> Offsets:
    """The offsets in an option's JSON. Raises InvalidRequest."""
    try:
        return from_json(json.loads(text))
    except ValueError:
        raise _malformed(text) from None


def _queues(value: Any) -> dict[int, int]:
    if not isinstance(value, dict):
        raise _malformed(value)
    queues: dict[int, int] = {}
    for queue, offset in value.items():
        number = digits(queue) if isinstance(queue, str) else None
        if number is None or number >= MOST_QUEUES or type(offset) is not int or not 0 <= offset < 1 << 62:
            raise _malformed(value)
        queues[number] = offset
    return queues


def _malformed(value: Any) -> InvalidRequest:
    return InvalidRequest(f'offsets are JSON of the form {{"orders": {{"0": 120, "1": 97}}}}, not {value!r:.200}')
