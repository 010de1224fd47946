"""Finds consumers over Kafka that stall: their partition has messages, but the group makes no progress in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from notify.kafka.groups import OWN_TOPICS, owner_topic
from notify.server.groups.kafka.offsets import Place
from notify.server.groups.kafka.snapshot import KafkaGroup, Member, Position

STALLED_SECONDS = 60.0


class Stuck:
    """How long each group has made no progress in a partition. Used by one thread at a time."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: dict[tuple[str, Place], tuple[int, int, float]] = {}
        """(position, messages done after it, when both were first seen)."""

    def look(self, groups: Iterable[KafkaGroup], paused: frozenset[str]) -> None:
        """Note the progress of all groups."""
        before, now = self._since, self._monotonic()
        self._since = {}
        for group in groups:
            for position in group.positions:
                if group.base not in paused and _waits_for_a_handler(position):
                    place = group.name, (position.topic, position.partition)
                    at = position.progress.offset, len(position.progress.done)
                    known = before.get(place)
                    self._since[place] = (*at, known[2] if known is not None and known[:2] == at else now)

    def state(self, group: KafkaGroup, member: Member) -> str:
        """`stuck` if a partition of this member has made no progress for STALLED_SECONDS, else `ok`."""
        owns = any(topic == owner_topic(group.base) for topic, _ in member.places)
        places = [(p.topic, p.partition) for p in group.positions] if owns else member.places
        since = [self._since[group.name, place][2] for place in places if (group.name, place) in self._since]
        return "stuck" if since and self._monotonic() - min(since) > STALLED_SECONDS else "ok"


def _waits_for_a_handler(position: Position) -> bool:
    """Whether a partition has messages, and none waits for its next attempt."""
    return position.lag > 0 and not position.progress.failed and not position.topic.startswith(OWN_TOPICS)
