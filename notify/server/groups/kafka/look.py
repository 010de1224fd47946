"""The newest snapshot of a cluster's groups, and what operators want of them."""

from __future__ import annotations

import time
from functools import partial

import structlog
from confluent_kafka import KafkaException

from notify.errors import NotFound
from notify.kafka.asker import Asker
from notify.server.groups.kafka.answers import PASSING
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.snapshot import KafkaGroup, Snapshot, take
from notify.server.groups.kafka.stalls import Stalls
from notify.server.groups.kafka.wishes import Wishes

log = structlog.get_logger("notify.server")

FRESH_SECONDS = 1.0
"""A snapshot so young serves several requests: a console asks for many things at once."""
IN_PART_SECONDS = 30.0
"""So long after partitions or groups had no leader, brokers are not asked to tell all."""


class Look:
    """One thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._asker = Asker(brokers.cluster)
        self.wishes = Wishes(brokers)
        self.stalls = Stalls()
        self.last = Snapshot({}, {})
        """The newest snapshot, whenever it was taken."""
        self.paused: frozenset[str] = frozenset()
        """The consumer groups that operators want to be paused, as of then."""
        self._taken_at = self._in_part_until = float("-inf")

    def now(self) -> Snapshot:
        """A snapshot of at most FRESH_SECONDS ago. Raises KafkaException, TimeoutError, Unavailable."""
        if time.monotonic() - self._taken_at > FRESH_SECONDS:
            self.last = self._take()
            self.paused = frozenset(name for name, wish in self.wishes.read().items() if wish.paused)
            self.stalls.look(self.last.groups.values(), self.paused)
            self._taken_at = time.monotonic()
        return self.last

    def again(self) -> Snapshot:
        """A snapshot of now, for what was made since the last one."""
        self._taken_at = float("-inf")
        return self.now()

    def known(self, name: str) -> KafkaGroup:
        """Raises NotFound."""
        group = self.now().groups.get(name) or self.again().groups.get(name)
        if group is None:
            raise NotFound(f"Kafka has no consumer group {name[:100]!r} of Notify's")
        return group

    def close(self) -> None:
        self.wishes.close()
        self._asker.close()

    def _take(self) -> Snapshot:
        if time.monotonic() >= self._in_part_until:
            try:
                return self._brokers.insist(lambda: self._asker.ask(take))
            except KafkaException as raised:
                if raised.args[0].code() not in PASSING:
                    raise
                self._in_part_until = time.monotonic() + IN_PART_SECONDS
                log.warning("kafka_shown_in_part", reason=raised.args[0].str())
        return self._asker.ask(partial(take, in_part=True))
