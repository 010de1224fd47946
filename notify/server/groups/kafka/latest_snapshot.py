"""The newest snapshot of a cluster's groups, and operators' wishes for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import structlog
from confluent_kafka import KafkaException

from notify.errors import NotFound
from notify.kafka.admin_process import AdminProcess
from notify.kafka.control import CONTROL, Control
from notify.kafka.groups import OWN_TOPICS, owner_topic
from notify.kafka.table import PARTITION
from notify.server.groups.kafka.answers import PASSING
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics
from notify.server.groups.kafka.offsets import Place
from notify.server.groups.kafka.snapshot import KafkaGroup, Member, Position, Snapshot, take

TRANSACTIONAL_ID = "notify-control"


class Orders:
    """The newest wishes for each group. Used by one thread at a time."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._by_group: dict[str, Control] = {}
        self._topic = CompactedTopics(brokers, lambda _: self._by_group.clear())

    def read(self, *, whole: bool = False) -> dict[str, Control]:
        """The wishes by group. If the topic has no leader, those read last are returned, or with `whole` it raises.

        Raises KafkaException, Unavailable.
        """
        for group, wish, _ in self._topic.rows(CONTROL, whole=whole):
            self._by_group[group] = wish
        return self._by_group

    def change(self, group: str, change: Callable[[Control], Control]) -> None:
        """Replace a group's wish by `change` of the present one. No other server can change it meanwhile.

        Raises KafkaException, Unavailable.
        """
        CONTROL.make(self._brokers.cluster)
        with self._brokers.transaction(TRANSACTIONAL_ID) as producer:
            changed = change(self.read(whole=True).get(group, Control()))
            key, value = CONTROL.record(group, changed)
            producer.begin_transaction()
            producer.produce(CONTROL.topic, value, key, PARTITION)

    def close(self) -> None:
        self._topic.close()


STALLED_SECONDS = 60.0
BLOCKED_SECONDS = 120.0
"""Transactions of bridges and relays may stay open for a minute."""


class Stuck:
    """How long each group has made no progress in a partition. Used by one thread at a time."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: dict[tuple[str, Place], tuple[int, int, float]] = {}
        """(position, messages done after it, when both were first seen)."""
        self._blocked: dict[tuple[str, Place], tuple[int, float]] = {}
        """(position, when it was first seen), where an open transaction hides all that follows."""

    def look(self, groups: Iterable[KafkaGroup], paused: frozenset[str]) -> None:
        """Note the progress of all groups."""
        before, blocked, now = self._since, self._blocked, self._monotonic()
        self._since, self._blocked = {}, {}
        for group in groups:
            for position in group.positions:
                if position.is_blocked:
                    place, offset = (group.name, (position.topic, position.partition)), position.progress.offset
                    known_block = blocked.get(place)
                    is_same = known_block is not None and known_block[0] == offset
                    self._blocked[place] = known_block if known_block is not None and is_same else (offset, now)
                if group.base not in paused and _waits_for_a_handler(position):
                    place = group.name, (position.topic, position.partition)
                    at = position.progress.offset, len(position.progress.done)
                    known = before.get(place)
                    self._since[place] = (*at, known[2] if known is not None and known[:2] == at else now)

    def blocked(self, group: KafkaGroup) -> list[str]:
        """The partitions, as topic/number, where an open transaction has hidden all that follows for
        BLOCKED_SECONDS."""
        now = self._monotonic()
        return [
            f"{topic}/{partition}"
            for (name, (topic, partition)), (_, since) in self._blocked.items()
            if name == group.name and now - since > BLOCKED_SECONDS
        ]

    def state(self, group: KafkaGroup, member: Member) -> str:
        """`stuck` if a partition of this member has made no progress for STALLED_SECONDS, else `ok`."""
        owns = any(topic == owner_topic(group.base) for topic, _ in member.places)
        places = [(p.topic, p.partition) for p in group.positions] if owns else member.places
        since = [self._since[group.name, place][2] for place in places if (group.name, place) in self._since]
        return "stuck" if since and self._monotonic() - min(since) > STALLED_SECONDS else "ok"


def _waits_for_a_handler(position: Position) -> bool:
    """Whether a partition has messages, and none waits for its next attempt."""
    return position.lag > position.hidden and not position.progress.failed and not position.topic.startswith(OWN_TOPICS)


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
