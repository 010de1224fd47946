"""Makes and changes topics. Nothing else does, so that all parts that follow topics learn of each change."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from notify.admin_api.topics import TopicWrite
from notify.errors import InvalidRequest, UnknownTopic
from notify.protocol.limits import check_name
from notify.storage.groups import Subscription
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.queues import Store, queues_of
from notify.storage.topics import Topic
from notify.storage.transactions import TransactionStore


class Topics:
    """The topics of a server. Call its methods on the event loop only."""

    def __init__(self, store: TransactionStore, *, on_first_use: bool = True) -> None:
        self._store = store
        self._queues = queues_of(store)
        self.on_first_use = on_first_use
        """Whether `use` makes a topic that does not exist."""
        self._listeners: list[Callable[[Topic], None]] = []

    def listen(self, listener: Callable[[Topic], None]) -> None:
        """Call `listener` with each topic that is made or changed, before a message can be appended to it."""
        self._listeners.append(listener)

    def use(self, name: str) -> Topic:
        """The topic of a name, made on its first use. It is durable before the message that names it.

        Raises InvalidRequest if `name` is not a valid name, UnknownTopic if topics are not made on their first use.
        """
        topic = self._store.topic(name)
        if topic is not None:
            return topic
        check_name("topic", name)
        self.check_use(name)
        return self.put_soon(Topic(name))

    def check_use(self, name: str) -> None:
        """Raises UnknownTopic if a topic does not exist, and topics are not made on their first use."""
        if not (self.on_first_use or self._store.has_topic(name)):
            raise UnknownTopic(
                f"there is no topic {name!r}, and topics are not created on first use here: "
                f"make it with `notify topic create {name} --reason …`"
            )

    def put_soon(self, topic: Topic) -> Topic:
        """Make or change a topic without waiting: it becomes durable before all that is written after it. Raises the
        storage's errors; then nothing has changed."""
        self._store.create_topic_soon(topic, () if self._store.has_topic(topic.name) else self._followers(topic))
        made = self._store.topic(topic.name)
        assert made is not None
        for listener in self._listeners:
            listener(made)
        return made

    def _followers(self, topic: Topic) -> Sequence[Subscription]:
        """The subscriptions that patterns make to a new topic, one for each group."""
        patterns = () if self._queues is None else self._queues.patterns()
        groups: dict[str, Subscription] = {}
        for pattern in patterns:
            if is_meant(pattern.topic, topic.name):
                groups.setdefault(pattern.group, dataclasses.replace(pattern, topic=topic.name))
        return list(groups.values())


def is_meant(pattern: str, topic: str) -> bool:
    """Whether a pattern matches a topic. It matches no internal topic, such as those of dead letters and retries."""
    return fnmatchcase(topic, pattern) and not topic.startswith(DEAD_LETTER_PREFIX) and "/" not in topic


def check_retry(ttl_us: int, group: str, topic: str, retry_min_us: int) -> None:
    """Raises InvalidRequest if a topic's messages expire before a group's first retry."""
    if 0 < ttl_us < retry_min_us:
        raise InvalidRequest(
            f"messages of topic {topic!r} expire after {ttl_us / 1e6:g} s, before group {group!r} tries one again "
            f"({retry_min_us / 1e6:g} s): choose a longer ttl or a shorter retry_min",
            "ttl_below_retry",
        )


_POLICY = tuple(
    name
    for field in dataclasses.fields(TopicWrite)
    for name in (field.name, f"{field.name}_us")
    if field.name != "queues" and name in Topic.__dataclass_fields__
)
"""The fields of a topic that are its policy: in requests and answers times are in seconds, choices in lower case."""


def policy(topic: Topic) -> dict[str, Any]:
    """A topic's policy as the routes show it; times are in seconds."""
    shown: dict[str, Any] = {}
    for name in _POLICY:
        value = getattr(topic, name)
        if name.endswith("_us"):
            shown[name.removesuffix("_us")] = value / 1e6
        else:
            shown[name] = value.name.lower() if isinstance(value, enum.Enum) else value
    return shown


def changed(topic: Topic, write: TopicWrite) -> Topic:
    """The topic with the fields that a request has; the others stay."""
    changes: dict[str, Any] = {}
    for name in ("queues", *_POLICY):
        value, before = getattr(write, name.removesuffix("_us")), getattr(topic, name)
        if value is not None:
            if isinstance(before, enum.Enum):
                value = type(before)[value.upper()]
            changes[name] = round(value * 1e6) if name.endswith("_us") else value
    return dataclasses.replace(topic, **changes)


def described(queues: Store, topic: Topic) -> dict[str, Any]:
    """A topic as the routes show it: its queues with their offsets, and its policy."""
    rows = [_queue(queues, topic.name, number) for number in range(topic.queues)]
    return {"name": topic.name, "number": topic.number, "queues": rows} | policy(topic)


def _queue(queues: Store, topic: str, number: int) -> dict[str, Any]:
    start, end = queues.bounds(topic, number)
    row: dict[str, Any] = {"queue": number, "start": start, "end": end}
    if gaps := queues.gaps(topic, number):
        row["gaps"] = gaps
    return row
