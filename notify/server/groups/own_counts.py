"""The figures of this server's own topics and groups for charts."""

from __future__ import annotations

from collections.abc import Sequence

from notify.errors import NotFound
from notify.server.core.core import Core
from notify.server.groups.own_topics import INTERNAL
from notify.server.watch.figures import Counts

MOST_QUEUES = 64
"""The most lagging queues of a group whose oldest messages a chart reads; with more the age is left out."""
READ_BYTES = 1 << 20


class OwnCounts:
    """The figures of the own queues. Every method raises WrongRole if the server has no queues."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def topics(self) -> Sequence[str]:
        return [t.name for t in self._core.queues.topics() if not t.name.startswith(INTERNAL)]

    def topic(self, name: str) -> Counts:
        topic = self._core.queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        sent = sum(self._core.queues.bounds(name, queue)[1] for queue in range(topic.queues))
        return Counts(sent, self._core.delivery.followers.lag(name))

    def groups(self) -> Sequence[str]:
        return [name for name in self._core.delivery.groups if "@" not in name]  # a broadcast's instances have none

    def group(self, name: str) -> Counts:
        group = self._core.delivery.groups.get(name)
        if group is None:
            raise NotFound(f"there is no group {name[:100]!r}")
        settled = sum(c.progress.floor + c.progress.settled.offsets for c in group.cursors.values())
        lagging = sum(1 for c in group.cursors.values() if c.lag())
        oldest = oldest_seconds(self._core, name, self._core.clock()) if lagging <= MOST_QUEUES else None
        return Counts(settled, group.lag(), oldest)


def oldest_seconds(core: Core, group: str, now_us: int) -> float | None:
    """The age, in seconds, of the oldest message that a group has not settled; None if there is none."""
    oldest = None
    for cursor in core.delivery.groups[group].cursors.values():
        if not cursor.lag():
            continue
        first = core.queues.read(cursor.topic, cursor.queue, cursor.progress.floor, 1, READ_BYTES)
        if first and (oldest is None or first[0].committed_us < oldest):
            oldest = first[0].committed_us
    return None if oldest is None else round(max(0, now_us - oldest) / 1e6, 3)
