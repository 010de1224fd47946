"""How a group's messages leave its queues without being settled, read from a log's META records.

A reset skips messages, a subscription ends, a topic is deleted, and a queue's first messages are dropped. Each of
these gives stretches of offsets that a group was to receive, and is not any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from notify.storage.groups import Subscription
from notify.storage.log import meta
from notify.storage.topics import Backlog

RESET, UNSUBSCRIBED, DELETED, TRIMMED, EXPIRED, LETTER_PURGED, LETTER_DROPPED, LETTERS_DELETED = (
    "reset", "unsubscribed", "topic deleted", "purged", "expired", "dead letter purged", "dead letter dropped",
    "dead letters deleted",
)  # fmt: skip
"""How messages left a group's queues. TRIMMED: a purge, or a full backlog with the policy `drop_oldest`."""
END = 1 << 62
"""Behind every offset, and after every instant."""
TOGETHER_US = 600_000_000
"""A queue that is trimmed again within this time is one change. So are all trims of a topic that trims itself, every
second perhaps, until its subscriptions change."""


@dataclass(frozen=True)
class Left:
    """Offsets [first, end) of a queue that a group was to receive until something happened.

    Which of these the group had settled is not known here. Instants are in microseconds since 1970.
    """

    how: str
    group: str
    topic: int
    """The topic's number in its input."""
    queue: int
    first: int
    end: int
    at_us: int
    until_us: int
    """When it happened for the last time, if several changes are one stretch."""
    subscription: Subscription | None
    """The group's subscription; None: not known."""
    reset: str = ""
    """RESET over Kafka: the reset's id, which the record of the action has, too."""
    queued_to_us: int = END
    """Only messages queued up to this instant: where no record says at which offset a subscription ended."""

    def holds(self, offset: int, queued_us: int) -> bool:
        return self.first <= offset < self.end and queued_us <= self.queued_to_us


@dataclass
class _Change:
    position: int
    at_us: int
    until_us: int
    record: meta.Subscribed | meta.Unsubscribed | meta.TopicDeleted | meta.StartSet


@dataclass
class Changes:
    """Collects the records in log order. `left` needs all of them."""

    present: list[Subscription] = field(default_factory=list)
    """The subscriptions of the log's checkpoint."""
    names: dict[int, str] = field(default_factory=dict)
    """The name of each topic number."""
    trimming: set[int] = field(default_factory=set)
    """The topic numbers that ever had a policy by which the server trims them."""
    _made: dict[int, int] = field(default_factory=dict)
    """The position of the first record of each topic number."""
    _list: list[_Change] = field(default_factory=list)
    _settings: dict[tuple[str, str], Subscription] = field(default_factory=dict)
    """The newest settings of each group and topic."""
    _trims: dict[tuple[int, int], _Change] = field(default_factory=dict)
    """The last change of each queue, if it was trimmed since anything else changed."""

    def take(self, position: int, time_us: int, record: meta.Meta | None) -> None:
        """Add a record if it matters here."""
        match record:
            case meta.TopicSet():
                self._made.setdefault(record.number, position)
                self.names[record.number] = record.name
                if trims_itself(record.more):
                    self.trimming.add(record.number)
            case meta.StartSet():
                self._trim(position, time_us, record)
            case meta.Subscribed():
                key = (record.subscription.group, record.subscription.topic)
                # Consumers subscribe at each start, and most change nothing.
                if record.offsets is not None or self._settings.get(key) != record.subscription:
                    self._add(position, time_us, record, key[1])
                self._settings[key] = record.subscription
            case meta.Unsubscribed():
                self._settings.pop((record.group, record.topic), None)
                self._add(position, time_us, record, record.topic)
            case meta.TopicDeleted():
                for key in [key for key in self._settings if key[1] == record.name]:
                    del self._settings[key]
                self._add(position, time_us, record, record.name)

    def _add(
        self, position: int, time_us: int, record: meta.Subscribed | meta.Unsubscribed | meta.TopicDeleted, topic: str
    ) -> None:
        for place in [place for place in self._trims if self.names.get(place[0], topic) == topic]:
            del self._trims[place]
        self._list.append(_Change(position, time_us, time_us, record))

    def _trim(self, position: int, time_us: int, record: meta.StartSet) -> None:
        place = (record.topic, record.queue)
        last = self._trims.get(place)
        if last is not None and (record.topic in self.trimming or time_us - last.at_us < TOGETHER_US):
            last.record, last.until_us = record, time_us
            return
        self._trims[place] = _Change(position, time_us, time_us, record)
        self._list.append(self._trims[place])

    def trims(self, topic: int, queue: int) -> Iterator[tuple[int, int]]:
        """When the first messages of a queue were dropped, and up to which offset."""
        for change in self._list:
            record = change.record
            if isinstance(record, meta.StartSet) and (record.topic, record.queue) == (topic, queue):
                yield change.at_us, record.offset

    def deleted(self, topics: Mapping[int, str]) -> dict[int, int]:
        """When topics were deleted, by number. `topics`: names by number."""
        numbers = _by_name(topics)
        times = {
            self._number(numbers, change.record.name, change.position): change.at_us
            for change in self._list
            if isinstance(change.record, meta.TopicDeleted)
        }
        return {number: at_us for number, at_us in times.items() if number is not None}

    def left(self, topics: Mapping[int, str], queues: Mapping[int, int]) -> Iterator[Left]:
        """All that left, in log order. `topics`: names by number; `queues`: how many each topic has."""
        numbers = _by_name(topics)
        course = _Course(topics, queues, self._earliest())
        for change in self._list:
            yield from course.go_on(change, self._number(numbers, _topic_of(change.record), change.position))

    def _number(self, numbers: Mapping[str, list[int]], name: str, position: int) -> int | None:
        """The number of the topic that had this name at a position: deleted and made again, it has another one."""
        of_name = numbers.get(name, [])
        made = [number for number in of_name if self._made.get(number, -1) < position]
        return made[-1] if made else of_name[0] if of_name else None

    def _earliest(self) -> dict[tuple[str, str], Subscription | None]:
        """The subscriptions from before the first record, where what follows tells of them; None: not which they were.

        A subscription whose first record is that of its beginning began there.
        """
        first: dict[tuple[str, str], tuple[bool, Subscription | None]] = {}
        for change in self._list:
            record = change.record
            if isinstance(record, meta.Subscribed):
                s = record.subscription
                is_older = record.offsets is None or s.epoch > 0  # an epoch begins with each reset
                first.setdefault((s.group, s.topic), (is_older, s))
            elif isinstance(record, meta.Unsubscribed):
                first.setdefault((record.group, record.topic), (True, record.subscription))
            elif isinstance(record, meta.TopicDeleted):
                for s in record.subscriptions:
                    first.setdefault((s.group, s.topic), (True, s))
        for s in self.present:
            first.setdefault((s.group, s.topic), (True, s))
        return {key: subscription for key, (is_older, subscription) in first.items() if is_older}


def trims_itself(more: meta.MorePolicies) -> bool:
    """Whether a topic has a policy by which the server drops its first messages."""
    return more.backlog_policy is Backlog.DROP_OLDEST or more.retention_bytes > 0


def _topic_of(record: meta.Subscribed | meta.Unsubscribed | meta.TopicDeleted | meta.StartSet) -> str:
    """The name of a change's topic; "" where the record has its number."""
    if isinstance(record, meta.Subscribed):
        return record.subscription.topic
    if isinstance(record, meta.Unsubscribed):
        return record.topic
    return record.name if isinstance(record, meta.TopicDeleted) else ""


def _by_name(topics: Mapping[int, str]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for number, name in sorted(topics.items()):
        numbers.setdefault(name, []).append(number)
    return numbers


@dataclass
class _Running:
    """A subscription while it lasts. `starts`: the first offset of each queue; 0 for queues beyond the list."""

    subscription: Subscription | None
    starts: list[int] = field(default_factory=list)

    def start(self, queue: int) -> int:
        return self.starts[queue] if queue < len(self.starts) else 0


class _Course:
    """The subscriptions as one change follows the other."""

    def __init__(
        self,
        topics: Mapping[int, str],
        queues: Mapping[int, int],
        earliest: Mapping[tuple[str, str], Subscription | None],
    ) -> None:
        self._topics = topics
        self._queues = queues
        self._running = {key: _Running(subscription) for key, subscription in earliest.items()}
        self._trimmed: dict[tuple[int, int], int] = {}

    def go_on(self, change: _Change, number: int | None) -> Iterator[Left]:
        """Carry out the next change. `number`: that of its topic now; None: damage took the record that made it."""
        record = change.record
        queues = range(0 if number is None else self._queues.get(number, 1))
        if isinstance(record, meta.Subscribed):
            yield from self._subscribe(change, record, number or 0, queues)
        elif isinstance(record, meta.Unsubscribed):
            running = self._running.pop((record.group, record.topic), None) or _Running(record.subscription)
            for queue in queues:
                # Older versions wrote no ends: a message is queued a moment before its frame is written.
                end = record.ends[queue] if queue < len(record.ends) else 0 if record.ends else END
                left = self._left(UNSUBSCRIBED, change, (record.group, number or 0), queue, running, end)
                yield from (replace(each, queued_to_us=END if record.ends else change.at_us) for each in left)
        elif isinstance(record, meta.TopicDeleted):
            ended = {(s.group, s.topic): _Running(s) for s in record.subscriptions}
            ended |= {key: running for key, running in self._running.items() if key[1] == record.name}
            for key, running in ended.items():
                self._running.pop(key, None)
                for queue in queues:
                    yield from self._left(DELETED, change, (key[0], number or 0), queue, running, END)
        else:
            name = self._topics.get(record.topic, "")
            for (group, topic), running in self._running.items():
                if topic == name:
                    place = (group, record.topic)
                    yield from self._left(TRIMMED, change, place, record.queue, running, record.offset)
            self._trimmed[record.topic, record.queue] = record.offset

    def _subscribe(
        self, change: _Change, record: meta.Subscribed, number: int, queues: Sequence[int]
    ) -> Iterator[Left]:
        subscription, offsets = record.subscription, record.offsets
        key = (subscription.group, subscription.topic)
        running = self._running.get(key)
        if running is None:
            self._running[key] = _Running(subscription, list(offsets or ()))
            return
        if offsets is not None:
            for queue, offset in zip(queues, offsets, strict=False):
                yield from self._left(RESET, change, (subscription.group, number), queue, running, offset)
            running.starts = list(offsets)
        running.subscription = subscription

    def _left(
        self, how: str, change: _Change, place: tuple[str, int], queue: int, running: _Running, end: int
    ) -> Iterator[Left]:
        """The offsets of a running subscription, from its start or the queue's first, up to an offset."""
        group, number = place
        subscription = running.subscription
        if "@" in group or (subscription is not None and subscription.mode == "broadcast"):
            return  # no record says which instances there should be
        first = max(running.start(queue), self._trimmed.get((number, queue), 0))
        if first < end:
            yield Left(how, group, number, queue, first, end, change.at_us, change.until_us, subscription)
