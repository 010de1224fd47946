"""A consumer group's subscriptions and priorities, its progress in a queue, and what it has settled."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from notify.storage.runs import OffsetRuns


@dataclass(slots=True)
class Subscription:
    """A group's wishes of a topic. `start` has been resolved to an offset per queue when it was made."""

    group: str
    topic: str
    mode: str = "shared"
    tags: tuple[str, ...] = ()
    max_attempts: int = 16
    retry_min_us: int = 1_000_000
    retry_max_us: int = 300_000_000
    filter: str = ""  # an expression over headers, key and tag; see notify/server/delivery/filter.py
    epoch: int = 0  # rises with each reset: offsets go back only between epochs
    of_topic: str = ""  # of a retry topic: the topic whose messages it holds
    replay: int = 0  # which run of the topic's messages it is for an inbox: a higher one has effects again
    last_replay: int = 0  # the highest number that a reset or redrive of this subscription was given
    inbox_from_us: int = -1  # its consumers' inbox has rows of messages committed from then on; -1: nobody has said


@dataclass(slots=True)
class PriorityClass:
    """Topics that share `weight` parts of a group's deliveries; `topics` are names, or patterns with `*`."""

    name: str
    weight: int
    topics: tuple[str, ...] = ()


@dataclass(slots=True)
class Priorities:
    """How a group's topics share its deliveries. A topic's share is how many turns it has within its class."""

    classes: tuple[PriorityClass, ...] = ()
    shares: dict[str, int] = field(default_factory=dict)


class Progress(Protocol):
    """How far a group has come in one queue: everything below `floor` is settled, and `settled` above it."""

    @property
    def floor(self) -> int: ...

    @property
    def settled(self) -> OffsetRuns: ...

    @property
    def attempts(self) -> dict[int, int]: ...

    @property
    def retry_at(self) -> dict[int, int]: ...

    def is_settled(self, offset: int) -> bool: ...

    def next_unsettled(self, offset: int) -> int: ...

    def unsettled(self, first: int, end: int) -> list[tuple[int, int]]: ...


class SettleKind(enum.IntEnum):
    """Why an offset is done with."""

    ACK = 0
    FILTERED = 1
    DEAD_LETTER = 2
    CORRUPT = 3
    EXPIRED = 4


@dataclass(frozen=True, slots=True)
class Settlement:
    """A group's settlement of a message."""

    group: str
    kind: SettleKind | None
    """None: an attempt failed, and the message is to be delivered again."""
    at_us: int
    """When it was recorded, by the server's clock."""
    attempts: int = 0
    """Attempts until then, of a failed one."""
