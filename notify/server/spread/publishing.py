"""Chooses the worker that publishes a message again: always the same one, and none if the message is in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notify.keys import shard_of_key
from notify.server.spread.combining import Answer

UNKNOWN = 404
"""The status of a message without a topic if the worker has no half of it."""


def chosen(messages: Sequence[Answer], rows: Sequence[Sequence[Answer]], names: Sequence[str]) -> list[int]:
    """For each message, the number of the worker whose answer counts.

    `messages`: the messages of the request; `rows`: each worker's answers for them in a dry run, with a status if it
    refuses a message. A refusal by any worker counts, unless that worker does not know the message.
    """
    numbers = range(len(names))
    workers: list[int] = []
    for index, message in enumerate(messages):
        statuses = [rows[number][index].get("status") for number in numbers]
        refusing = [number for number in numbers if statuses[number] not in (None, UNKNOWN)]
        ready = [number for number in numbers if statuses[number] is None]
        by_key = _worker_of_key(message, names)
        workers.append((refusing or [number for number in ready if number == by_key] or ready or [by_key])[0])
    return workers


def by_worker(chosen: Sequence[int], items: Sequence[Answer]) -> dict[int, list[int]]:
    """The indexes of the messages that each worker publishes; refused messages are left out."""
    indexes: dict[int, list[int]] = {}
    for index, (number, item) in enumerate(zip(chosen, items, strict=True)):
        if "status" not in item:
            indexes.setdefault(number, []).append(index)
    return indexes


def _worker_of_key(message: Answer, names: Sequence[str]) -> int:
    """The worker of the message's key; without a key, the worker of its id."""
    key: Any = message.get("key")
    return names.index(shard_of_key(key if isinstance(key, str) else message["id"], names))
