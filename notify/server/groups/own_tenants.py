"""The tenants that wait for their turns in this server's own groups, for administrators and metrics."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from notify.protocol.wire import instant
from notify.server.core.core import Core
from notify.server.delivery.fair import FairTurns
from notify.server.delivery.group import Group
from notify.server.delivery.lanes import Waits
from notify.server.groups.own import group_of

MOST_LISTED = 100
MOST_READ = 16
"""The most queues of a topic in which the oldest message of a tenant is looked for."""


class Share(NamedTuple):
    """How the waiting messages of a group's topic are shared by its tenants."""

    topic: str
    tenants: int
    waiting: int
    largest: float
    """The part of them that one tenant has, at most 1."""


def listed(core: Core, name: str, topic: str, most: int) -> dict[str, Any]:
    """The `most` tenants with the most waiting messages, of all topics or of one. Raises NotFound and WrongRole."""
    group = group_of(core, name)
    tenants = [
        (sum([waits.messages for _, waits in queues]), served, number, queues)
        for served, by_number in _waits(group).items()
        if not topic or served == topic
        for number, queues in by_number.items()
    ]
    now_us = core.clock()
    largest = heapq.nlargest(most, tenants, key=lambda tenant: tenant[0])
    return {
        "tenants": [_row(served, number, count, queues, now_us) for count, served, number, queues in largest],
        "of": len(tenants),
        "waiting": sum(count for count, *_ in tenants),
    }


def shares(group: Group) -> Iterator[Share]:
    """The share of each topic of a group in which tenants take turns and wait."""
    for topic, by_number in _waits(group).items():
        counts = [sum([waits.messages for _, waits in queues]) for queues in by_number.values()]
        yield Share(topic, len(counts), sum(counts), max(counts) / sum(counts))


Queues = list[tuple[FairTurns, Waits]]


def _waits(group: Group) -> dict[str, dict[int, Queues]]:
    """By topic and the number of a lane: in which queues how much waits."""
    topics: dict[str, dict[int, Queues]] = {}
    for cursor in group.cursors.values():
        if isinstance(cursor, FairTurns):
            for number, waits in cursor.waits().items():
                topics.setdefault(cursor.serves, {}).setdefault(number, []).append((cursor, waits))
    return topics


def _row(topic: str, number: int, count: int, queues: Queues, now_us: int) -> dict[str, Any]:
    found = [cursor.oldest(waits) for cursor, waits in queues[:MOST_READ]]
    name, oldest_us = min((each for each in found if each[1]), key=lambda each: each[1], default=(None, 0))
    return {
        "topic": topic,
        "tenant": None if number < 0 else name,
        "are_several": number < 0,
        "waiting": count,
        "oldest_at": instant(oldest_us) if oldest_us else None,
        "oldest_seconds": round(max(0, now_us - oldest_us) / 1e6, 3) if oldest_us else None,
    }
