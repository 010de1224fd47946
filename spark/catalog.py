"""A catalog of a server's log: topics, groups, subscriptions and bridges, learned from META records in log order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from notify.storage.log import meta
from notify.storage.log.checkpoint import Checkpoint
from notify.storage.names import DEAD_LETTER_PREFIX

RETRY_PREFIX = "retry/"
"""Prefix of the topics of redriven dead letters: `retry/{group}/{topic}`."""


@dataclass
class Subscribed:
    """A group's subscription to a topic according to the log."""

    group: str
    topic: str
    mode: str
    starts: list[int]
    """The first offset that the group is to receive of each queue; 0 for queues beyond the list."""
    since_us: int
    inbox_from_us: int = -1
    """The inbox of its consumers has rows of messages committed from then on; -1: they have told of no inbox."""
    moved: list[int] = field(default_factory=list)
    """Positions in the log where an operator reset the group: order is compared only between them."""
    is_filtered: bool = False
    """Whether the group takes only messages with certain tags, or that match an expression."""


@dataclass
class Bridged:
    """A bridge's record: the position of a source after a batch."""

    at: int
    time_us: int
    source: str
    epoch: int
    position: str
    since: str | None
    rows: int


@dataclass(frozen=True)
class Restore:
    """A log that lost its disk, and went on with what had been shipped of it. Instants in microseconds since 1970."""

    generation: int
    known_us: int
    """When the last was written that is not lost; `restored_us`: when it went on."""
    restored_us: int

    def may_lack(self, at_us: int, slack_us: int) -> bool:
        """Whether what was stored about an instant may have been lost."""
        return self.known_us - slack_us <= at_us <= self.restored_us + slack_us


@dataclass
class Catalog:
    """Topics, groups, subscriptions, bridges and restores according to the log."""

    topics: dict[int, str] = field(default_factory=dict)
    queues: dict[int, int] = field(default_factory=dict)
    """The number of queues of each topic number."""
    producer_groups: dict[int, str] = field(default_factory=dict)
    subscriptions: dict[tuple[str, str], Subscribed] = field(default_factory=dict)
    ever: set[tuple[str, str]] = field(default_factory=set)
    """(group, topic) of each subscription that there was, also of those that ended."""
    bridges: list[Bridged] = field(default_factory=list)
    last_bridged: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """The last of these of each source, by its place in the list, and whether it goes on from the one before."""
    restores: list[Restore] = field(default_factory=list)
    trimmed: dict[tuple[int, int], int] = field(default_factory=dict)
    """The offset of each (topic number, queue) below which messages were dropped on purpose."""

    @classmethod
    def of(cls, saved: Checkpoint | None) -> Catalog:
        """As a checkpoint of the log knows it; None: there is none."""
        catalog = cls()
        if saved is None:
            return catalog
        state = saved.state
        catalog.topics = {topic.number: topic.name for topic in state.topics}
        catalog.queues = {topic.number: topic.queues for topic in state.topics}
        catalog.producer_groups = dict(enumerate(state.producer_groups))
        for s in state.subscriptions:
            is_filtered = bool(s.tags or s.filter)
            catalog.subscriptions[s.group, s.topic] = Subscribed(
                s.group, s.topic, s.mode, [], 0, s.inbox_from_us, is_filtered=is_filtered
            )
            catalog.ever.add((s.group, s.topic))
        return catalog

    def kind_of(self, name: str) -> str:
        if name.startswith(DEAD_LETTER_PREFIX):
            return "dead_letter"
        return "retry" if name.startswith(RETRY_PREFIX) else "topic"

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        """For each (topic number, queue) the groups that are to receive it, each with its first offset."""
        numbers: dict[str, list[int]] = {}
        for number, name in self.topics.items():
            numbers.setdefault(name, []).append(number)  # a topic that was made again has another number
        groups: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for s in self.subscriptions.values():
            if s.mode == "broadcast" or "@" in s.group:
                continue  # no record says which instances there should be
            for number in numbers.get(s.topic, ())[-1:]:
                for queue in range(self.queues.get(number, 1)):
                    start = s.starts[queue] if queue < len(s.starts) else 0
                    start = max(start, self.trimmed.get((number, queue), 0))
                    groups.setdefault((number, queue), []).append((s.group, start))
        return groups

    def readers(self) -> dict[tuple[int, int], set[str]]:
        """For each (topic number, queue) the groups that ever subscribed to it.

        Who reads a topic of dead letters may have had any message.
        """
        of_topic: dict[str, set[str]] = {}
        of_letters: set[str] = set()
        for group, topic in self.ever:
            of_topic.setdefault(topic, set()).add(group)
            if self.kind_of(topic) == "dead_letter":
                of_letters.add(group)
        return {
            (number, queue): of_topic.get(name, set()) | of_letters
            for number, name in self.topics.items()
            for queue in range(self.queues.get(number, 1))
        }

    def inboxes(self) -> dict[str, int]:
        """The groups whose consumers have told the server of an inbox, and from when on it has rows (microseconds)."""
        told: dict[str, int] = {}
        for s in self.subscriptions.values():
            if s.inbox_from_us >= 0 and "@" not in s.group:
                told[s.group] = min(told.get(s.group, s.inbox_from_us), s.inbox_from_us)
        return told


def learn(catalog: Catalog, position: int, time_us: int, record: meta.Meta | None, seen: set[tuple[str, str]]) -> None:
    """Note a META record at a position of the log. `seen`: subscriptions of earlier records; this one's is added."""
    match record:
        case meta.TopicSet():
            catalog.topics[record.number] = record.name
            catalog.queues[record.number] = max(record.queues, catalog.queues.get(record.number, 0))
        case meta.ProducerGroupNumbered():
            catalog.producer_groups[record.number] = record.name
        case meta.Subscribed():
            _learn_subscription(catalog, position, time_us, record, seen)
        case meta.StartSet():
            catalog.trimmed[(record.topic, record.queue)] = record.offset
        case meta.Unsubscribed():
            catalog.ever.add((record.group, record.topic))
            catalog.subscriptions.pop((record.group, record.topic), None)
        case meta.TopicDeleted():
            for key in [key for key in catalog.subscriptions if key[1] == record.name]:
                del catalog.subscriptions[key]
        case meta.Restored():
            catalog.restores.append(Restore(record.generation, record.known_to_us, time_us))
        case meta.BridgeMoved(b):
            _learn_bridge(catalog, Bridged(position, time_us, b.source, b.epoch, b.position, b.since, b.rows))


def _learn_bridge(catalog: Catalog, new: Bridged) -> None:
    """Keep the first and the last of a bridge's records that follow each other, and let the last say that it followed
    the first, as in a segment (spark.bridged): the gaps between those that are left are the same."""
    at, is_second = catalog.last_bridged.get(new.source, (-1, False))
    before = catalog.bridges[at] if at >= 0 else None
    goes_on = before is not None and (new.since, new.epoch) == (before.position, before.epoch)
    if before is not None and goes_on and is_second:
        catalog.bridges[at] = replace(new, since=before.since)
        return
    catalog.last_bridged[new.source] = (len(catalog.bridges), goes_on)
    catalog.bridges.append(new)


def _learn_subscription(
    catalog: Catalog, position: int, time_us: int, record: meta.Subscribed, seen: set[tuple[str, str]]
) -> None:
    s = record.subscription
    key = (s.group, s.topic)
    before = catalog.subscriptions.get(key)
    moved = list(before.moved) if before else []
    if record.offsets is None:  # its terms changed, not its place
        starts = before.starts if before else []
    else:
        starts = list(record.offsets)
        if before is not None and key in seen:
            moved.append(position)
    since = before.since_us if before and key in seen else time_us
    is_filtered = bool(s.tags or s.filter)
    catalog.subscriptions[key] = Subscribed(
        s.group, s.topic, s.mode, starts, since, s.inbox_from_us, moved, is_filtered
    )
    catalog.ever.add(key)
    seen.add(key)
