"""The newest snapshot of a cluster's groups, and operators' wishes for them."""

from __future__ import annotations

import time
from functools import partial

import structlog
from confluent_kafka import KafkaException

from notify.errors import NotFound
from notify.kafka.admin_process import AdminProcess
from notify.server.groups.kafka.answers import PASSING
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.orders import Orders
from notify.server.groups.kafka.snapshot import KafkaGroup, Snapshot, take
from notify.server.groups.kafka.stuck import Stuck

log = structlog.get_logger("notify.server")

FRESH_SECONDS = 1.0
"""How long a snapshot serves further requests: a console sends many at once."""
IN_PART_SECONDS = 30.0
"""How long snapshots leave out partitions and groups without a leader, after one failed for that reason."""


class LatestSnapshot:
    """Takes snapshots. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._asker = AdminProcess(brokers.cluster)
        self.wishes = Orders(brokers)
        self.stalls = Stuck()
        self.last = Snapshot({}, {})
        """The newest snapshot, of any age."""
        self.paused: frozenset[str] = frozenset()
        """The consumer groups that operators had paused when the snapshot was taken."""
        self._taken_at = self._in_part_until = float("-inf")

    def now(self) -> Snapshot:
        """A snapshot that is at most FRESH_SECONDS old. Raises KafkaException, TimeoutError, Unavailable."""
        if time.monotonic() - self._taken_at > FRESH_SECONDS:
            self.last = self._take()
            self.paused = frozenset(name for name, wish in self.wishes.read().items() if wish.paused)
            self.stalls.look(self.last.groups.values(), self.paused)
            self._taken_at = time.monotonic()
        return self.last

    def again(self) -> Snapshot:
        """A new snapshot, which shows groups and topics made since the last one."""
        self._taken_at = float("-inf")
        return self.now()

    def known(self, name: str) -> KafkaGroup:
        """The group of a name. Raises NotFound."""
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
