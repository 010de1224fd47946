"""Combines the answers of several workers: counts are added up, equal values appear once, lists become one list.

A row that belongs to one worker, such as a queue of a topic, gets a field `worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notify.protocol.latency import SHARES
from notify.server.delivery.following import SETTINGS_SHOWN
from notify.server.watch.figures import OF_GROUPS, OF_TOPICS

Answer = dict[str, Any]

SAME = frozenset(
    ("number", "retention", "retention_bytes", "ttl", "backlog", *SETTINGS_SHOWN, "epoch", "replay", "share", "weight",
     "queue_count", "total", "free", "used_share", "status", "step_seconds", "job")
)  # fmt: skip
"""Numbers that are not added up: policies, which all workers share, and figures of the machine."""
LARGEST = frozenset(
    ("oldest_seconds", "oldest_undelivered_seconds", "newest_at", "last_at", "topics", "groups", "consumers",
     "changes_last_hour", *SHARES, *(f"{kind}_{share}" for kind in (*OF_TOPICS, *OF_GROUPS) for share in SHARES))
)  # fmt: skip
"""Among them latencies: those of the slowest worker."""
SMALLEST = frozenset(("first_at", "started_at", "youngest_seconds"))
NAMED_BY = {
    "topics": ("name", "topic"),
    "groups": ("name", "group"),
    "lagging": ("name",),
    "subscriptions": ("topic",),
    "patterns": ("topic",),
    "instances": ("name",),
    "failures": ("fingerprint",),
    "classes": ("name",),
    "senders": ("producer_group",),
}
"""Lists whose rows are combined if they have the same name, and the fields with that name."""
ONCE = {
    "alarms": ("name", "target"),
    "silences": ("name", "target"),
    "held_back": ("topic",),
    "left_behind": ("source", "producer_group"),
}
"""Lists in which several workers may have equal rows, and the fields that name a row: the first is shown."""
ITEMS = "items"
"""The list of results of single messages: a worker that knows the message counts before workers that answer 404."""


def combined(names: Sequence[str], answers: Sequence[Answer]) -> Answer:
    """One answer from several; `names`: the workers, in the order of the answers."""
    labels = list(names)
    return {key: _field(key, labels, [a.get(key) for a in answers]) for key in _keys(answers)}


def _keys(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for answer in answers for key in answer))


def _field(key: str, names: list[str], values: list[Any]) -> Any:
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    if not pairs:
        return None
    names, values = [name for name, _ in pairs], [value for _, value in pairs]
    first = values[0]
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, dict):
        return combined(names, values)
    if isinstance(first, list):
        return _list(key, names, values)
    if key in SAME:
        return first
    if key in LARGEST:
        return max(values)
    if key in SMALLEST:
        return min(values)
    if isinstance(first, int | float):
        return round(sum(values), 6) if isinstance(first, float) else sum(values)
    return first


def _list(key: str, names: list[str], lists: list[list[Any]]) -> list[Any]:
    if not all(isinstance(row, dict) for rows in lists for row in rows):
        return list(dict.fromkeys(value for rows in lists for value in rows))
    if key in NAMED_BY:
        return _by_name(names, lists, NAMED_BY[key])
    if key in ONCE:
        fields = ONCE[key]
        rows_by_name = {tuple(row.get(f) for f in fields): row for rows in reversed(lists) for row in reversed(rows)}
        return list(reversed(rows_by_name.values()))
    if key == ITEMS:
        return _items(lists)
    return [row | {"worker": name} for name, rows in zip(names, lists, strict=True) for row in rows]


def _by_name(names: list[str], lists: list[list[Answer]], fields: Sequence[str]) -> list[Answer]:
    by_key: dict[Any, tuple[list[str], list[Answer]]] = {}
    for name, rows in zip(names, lists, strict=True):
        for row in rows:
            key = next((row[field] for field in fields if field in row), None)
            workers, rows_of_key = by_key.setdefault(key, ([], []))
            workers.append(name)
            rows_of_key.append(row)
    return [combined(workers, rows) for workers, rows in by_key.values()]


def _items(lists: list[list[Answer]]) -> list[Answer]:
    best: dict[Any, Answer] = {}
    for rows in lists:
        for row in rows:
            earlier = best.get(row.get("id"))
            if earlier is None or (earlier.get("status") == 404 and row.get("status") != 404):
                best[row.get("id")] = row
    return list(best.values())


def ordered(
    answer: Answer, rows: str, key: Callable[[Answer], Any], most: int, *, largest_first: bool = False
) -> Answer:
    """A combined answer with its list `rows` sorted, and shortened to a length."""
    return answer | {rows: sorted(answer[rows], key=key, reverse=largest_first)[:most]}


def columns(names: Sequence[str], answers: Sequence[Answer]) -> Answer:
    """One chart from those of several workers: all their times, and at each time the combined value."""
    times = sorted({at for answer in answers for at in answer["at"]})
    merged: Answer = {}
    for key in _keys(answers):
        if key == "at":
            merged[key] = times
        elif isinstance(answers[0].get(key), list):
            by_time = [dict(zip(a["at"], a.get(key, []), strict=False)) for a in answers]
            merged[key] = [_field(key, list(names), [values.get(at) for values in by_time]) for at in times]
        else:
            merged[key] = answers[0].get(key)
    return merged
