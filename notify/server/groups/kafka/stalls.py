"""Consumers over Kafka that handle nothing: a partition of theirs has messages, and the group's progress stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from notify.kafka.groups import OWN_TOPICS, owner_topic
from notify.server.groups.kafka.offsets import Place
from notify.server.groups.kafka.snapshot import KafkaGroup, Member, Position

STALLED_SECONDS = 60.0


class Stalls:
    """How long each group's progress in a partition has been as it is. One thread at a time."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: dict[tuple[str, Place], tuple[int, int, float]] = {}
        """Position, messages that are done behind it, and the time when they were first seen so."""

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
        """`stuck` where a partition of this member has stood still for STALLED_SECONDS, else `ok`."""
        owns = any(topic == owner_topic(group.base) for topic, _ in member.places)
        places = [(p.topic, p.partition) for p in group.positions] if owns else member.places
        since = [self._since[group.name, place][2] for place in places if (group.name, place) in self._since]
        return "stuck" if since and self._monotonic() - min(since) > STALLED_SECONDS else "ok"


def _waits_for_a_handler(position: Position) -> bool:
    """Whether there are messages, and none of them waits for its next attempt."""
    return position.lag > 0 and not position.progress.failed and not position.topic.startswith(OWN_TOPICS)
