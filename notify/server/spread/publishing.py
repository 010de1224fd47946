"""Which worker publishes a message again: one, always the same, and none where another has the message in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.keys import shard_of_key
from notify.server.spread.combining import Answer

UNKNOWN = 404
"""The status of a message without a topic where the worker has no half of it."""


def chosen(messages: Sequence[Answer], rows: Sequence[Sequence[Answer]], names: Sequence[str]) -> list[int]:
    """The number of the worker whose answer counts for each message.

    `messages`: as they were asked for; `rows`: what each worker says of each of them in a dry run, with a status where
    it refuses one. A refusal counts wherever it comes from, except of a worker that does not know the message.
    """
    numbers = range(len(names))
    found: list[int] = []
    for place, message in enumerate(messages):
        statuses = [rows[number][place].get("status") for number in numbers]
        refusing = [number for number in numbers if statuses[number] not in (None, UNKNOWN)]
        ready = [number for number in numbers if statuses[number] is None]
        own = _own(message, names)
        found.append((refusing or [number for number in ready if number == own] or ready or [own])[0])
    return found


def by_worker(chosen: Sequence[int], items: Sequence[Answer]) -> dict[int, list[int]]:
    """The places of the messages that each worker publishes: of those that none refuses."""
    places: dict[int, list[int]] = {}
    for place, (number, item) in enumerate(zip(chosen, items, strict=True)):
        if "status" not in item:
            places.setdefault(number, []).append(place)
    return places


def _own(message: Answer, names: Sequence[str]) -> int:
    """The worker of a message's key, or without one the one that its id picks."""
    key: Any = message.get("key")
    return names.index(shard_of_key(key if isinstance(key, str) else message["id"], names))
