"""The catalog of a server's log: its topics, groups, subscriptions and bridges, read from META records in log order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from notify.spark.inputs.changes import Changes, trims_itself
from notify.storage.log import meta
from notify.storage.log.checkpoint import Checkpoint
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.topics import Backlog

RETRY_PREFIX = "retry/"
"""Prefix of the topics of redriven dead letters: `retry/{group}/{topic}`."""


@dataclass
class Subscribed:
    """A group's subscription to a topic, according to the log."""

    group: str
    topic: str
    mode: str
    starts: list[int]
    """The first offset of each queue that the group should receive; 0 for queues beyond the list."""
    since_us: int
    inbox_from_us: int = -1
    """The consumers' inbox has rows for messages committed from this time on; -1: the log knows of no inbox."""
    moved: list[int] = field(default_factory=list)
    """The log positions at which an operator reset the group: order is compared only between them."""
    is_filtered: bool = False
    """Whether the group takes only messages that have certain tags or match an expression."""


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
    """A log that lost its disk and was restored from its shipped segments. Instants are in microseconds since 1970."""

    generation: int
    known_us: int
    """When the last frame was written that is not lost."""
    restored_us: int
    """When the restored log continued."""
    position: int
    """Where it continued: everything in the earlier log from after this position is lost."""

    def may_lack(self, at_us: int, slack_us: int) -> bool:
        """Whether the log may have lost records that were written at about this instant."""
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
    """(group, topic) of each subscription that ever existed."""
    bridges: list[Bridged] = field(default_factory=list)
    last_bridged: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """For each source: the index of its last record in `bridges`, and whether that record continues the one before."""
    restores: list[Restore] = field(default_factory=list)
    trimmed: dict[tuple[int, int], int] = field(default_factory=dict)
    """The offset of each (topic number, queue) below which messages were dropped on purpose."""
    dropping: set[int] = field(default_factory=set)
    """The topic numbers whose full backlog ever dropped its oldest messages."""
    changes: Changes = field(default_factory=Changes)
    """All that made a group stop waiting for messages."""

    @classmethod
    def of(cls, saved: Checkpoint | None) -> Catalog:
        """The catalog of a checkpoint; an empty catalog if there is no checkpoint."""
        catalog = cls()
        if saved is None:
            return catalog
        state = saved.state
        catalog.topics = {topic.number: topic.name for topic in state.topics}
        catalog.queues = {topic.number: topic.queues for topic in state.topics}
        catalog.producer_groups = dict(enumerate(state.producer_groups))
        for subscription in state.subscriptions:
            key = (subscription.group, subscription.topic)
            is_filtered = bool(subscription.tags or subscription.filter)
            catalog.subscriptions[key] = Subscribed(
                *key, subscription.mode, [], 0, subscription.inbox_from_us, is_filtered=is_filtered
            )
            catalog.ever.add(key)
        catalog.dropping = {t.number for t in state.topics if t.more.backlog_policy is Backlog.DROP_OLDEST}
        catalog.changes.present = list(state.subscriptions)
        catalog.changes.names = dict(catalog.topics)
        catalog.changes.trimming = {topic.number for topic in state.topics if trims_itself(topic.more)}
        return catalog

    def kind_of(self, name: str) -> str:
        if name.startswith(DEAD_LETTER_PREFIX):
            return "dead_letter"
        return "retry" if name.startswith(RETRY_PREFIX) else "topic"

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        """For each (topic number, queue): the groups that should receive it, each with its first offset."""
        numbers: dict[str, list[int]] = {}
        for number, name in self.topics.items():
            numbers.setdefault(name, []).append(number)  # a topic that was deleted and made again has another number
        groups: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for subscribed in self.subscriptions.values():
            if subscribed.mode == "broadcast" or "@" in subscribed.group:
                continue  # no record says which instances there should be
            for number in numbers.get(subscribed.topic, ())[-1:]:
                for queue in range(self.queues.get(number, 1)):
                    start = subscribed.starts[queue] if queue < len(subscribed.starts) else 0
                    start = max(start, self.trimmed.get((number, queue), 0))
                    groups.setdefault((number, queue), []).append((subscribed.group, start))
        return groups

    def readers(self) -> dict[tuple[int, int], set[str]]:
        """For each (topic number, queue): the groups that ever subscribed to it.

        A group that reads a dead-letter topic may have received any message, so that it counts for every queue.
        """
        groups_of_topic: dict[str, set[str]] = {}
        readers_of_letters: set[str] = set()
        for group, topic in self.ever:
            groups_of_topic.setdefault(topic, set()).add(group)
            if self.kind_of(topic) == "dead_letter":
                readers_of_letters.add(group)
        return {
            (number, queue): groups_of_topic.get(name, set()) | readers_of_letters
            for number, name in self.topics.items()
            for queue in range(self.queues.get(number, 1))
        }

    def inboxes(self) -> dict[str, int]:
        """The groups whose consumers keep an inbox, and the time (microseconds since 1970) from which it has rows."""
        from_us: dict[str, int] = {}
        for subscribed in self.subscriptions.values():
            group, inbox_from_us = subscribed.group, subscribed.inbox_from_us
            if inbox_from_us >= 0 and "@" not in group:
                from_us[group] = min(from_us.get(group, inbox_from_us), inbox_from_us)
        return from_us


def learn(catalog: Catalog, position: int, time_us: int, record: meta.Meta | None, seen: set[tuple[str, str]]) -> None:
    """Add a META record to the catalog. `seen`: the subscriptions of earlier records; a new one is added to it."""
    catalog.changes.take(position, time_us, record)
    match record:
        case meta.TopicSet():
            catalog.topics[record.number] = record.name
            if record.more.backlog_policy is Backlog.DROP_OLDEST:
                catalog.dropping.add(record.number)
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
            catalog.restores.append(Restore(record.generation, record.known_to_us, time_us, position))
        case meta.BridgeMoved(bridge):
            state = Bridged(position, time_us, bridge.source, bridge.epoch, bridge.position, bridge.since, bridge.rows)
            _learn_bridge(catalog, state)


def _learn_bridge(catalog: Catalog, new: Bridged) -> None:
    """Add a bridge's record. In a run of records without a gap only the first and the last stay.

    The last one then says that it follows the first, as in a segment (spark.bridged), so that the gaps stay the same.
    """
    index, is_second = catalog.last_bridged.get(new.source, (-1, False))
    before = catalog.bridges[index] if index >= 0 else None
    continues = before is not None and (new.since, new.epoch) == (before.position, before.epoch)
    if before is not None and continues and is_second:
        catalog.bridges[index] = replace(new, since=before.since)
        return
    catalog.last_bridged[new.source] = (len(catalog.bridges), continues)
    catalog.bridges.append(new)


def _learn_subscription(
    catalog: Catalog, position: int, time_us: int, record: meta.Subscribed, seen: set[tuple[str, str]]
) -> None:
    subscription = record.subscription
    key = (subscription.group, subscription.topic)
    before = catalog.subscriptions.get(key)
    moved = list(before.moved) if before else []
    if record.offsets is None:  # the subscription's settings changed, and the group was not moved
        starts = before.starts if before else []
    else:
        starts = list(record.offsets)
        if before is not None and key in seen:
            moved.append(position)
    since = before.since_us if before and key in seen else time_us
    is_filtered = bool(subscription.tags or subscription.filter)
    catalog.subscriptions[key] = Subscribed(
        *key, subscription.mode, starts, since, subscription.inbox_from_us, moved, is_filtered
    )
    catalog.ever.add(key)
    seen.add(key)
