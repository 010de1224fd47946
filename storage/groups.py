"""A consumer group's subscriptions and priorities, its progress in a queue, and its settlements."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from notify.storage.holds import Hold
from notify.storage.runs import OffsetRuns

MOST_STEPS = 8
"""The most earlier bounds that a subscription remembers."""


@dataclass(slots=True)
class Subscription:
    """How a group receives the messages of a topic. The start of a subscription becomes an offset in each queue."""

    group: str
    topic: str
    mode: str = "shared"
    tags: tuple[str, ...] = ()
    max_attempts: int = 16  # failed attempts after which a message is a dead letter
    retry_min_us: int = 1_000_000
    retry_max_us: int = 300_000_000
    filter: str = ""  # an expression over headers, key and tag; see notify/protocol/filter.py
    epoch: int = 0  # rises with each reset: offsets go back only between epochs
    of_topic: str = ""  # if `topic` is a retry topic: the topic whose messages it holds
    replay: int = 0  # the number of this run through the topic: in a higher run messages have their effects again
    last_replay: int = 0  # the highest number that a reset or redrive of this subscription was given
    inbox_from_us: int = -1  # the consumers' inbox has rows for messages committed from this time on; -1: not known
    max_deaths: int = 16  # consumers that died while they held a message, after which it is a dead letter
    earlier: tuple[tuple[int, int, int], ...] = ()
    """Larger bounds from before, as (until when, max_attempts, max_deaths), the latest last: see `bounds`."""

    on_exhausted: str = "dead_letter"  # or "hold": in ordered mode the key of a message without attempts left stops
    fair_by: str = ""  # "key" or "header:NAME": what names the tenants that take turns

    @property
    def way(self) -> tuple[str, str]:
        """How messages are handed out: another way needs another cursor, and no active consumers."""
        return self.mode, self.fair_by

    def bounds(self, committed_us: int) -> tuple[int, int]:
        """The largest max_attempts and max_deaths that held since a message was committed: processes of two versions
        declare theirs in turns, and one that waits must not become a dead letter by the smaller numbers."""
        held = [step for step in self.earlier if step[0] > committed_us]
        return (
            max([self.max_attempts, *[attempts for _, attempts, _ in held]]),
            max([self.max_deaths, *[deaths for _, _, deaths in held]]),
        )

    def earlier_than(self, now_us: int, max_attempts: int, max_deaths: int) -> tuple[tuple[int, int, int], ...]:
        """The `earlier` of the subscription that takes this one's place now, with these bounds. At most MOST_STEPS: the
        oldest ones become one, with the larger bounds."""
        if (self.max_attempts, self.max_deaths) == (max_attempts, max_deaths):
            return self.earlier
        steps: list[tuple[int, int, int]] = []
        for until_us, attempts, deaths in reversed((*self.earlier, (now_us, self.max_attempts, self.max_deaths))):
            if attempts > max_attempts or deaths > max_deaths:  # later bounds are smaller
                steps.append((until_us, attempts, deaths))
                max_attempts, max_deaths = max(max_attempts, attempts), max(max_deaths, deaths)
        while len(steps) > MOST_STEPS:
            _, attempts, deaths = steps.pop()
            until_us, others, other_deaths = steps.pop()
            steps.append((until_us, max(attempts, others), max(deaths, other_deaths)))
        return tuple(reversed(steps))


@dataclass(slots=True)
class PriorityClass:
    """Topics that share `weight` parts of a group's deliveries; `topics` are names, or patterns with `*`."""

    name: str
    weight: int
    topics: tuple[str, ...] = ()


@dataclass(slots=True)
class Priorities:
    """How a group's topics share its deliveries. A topic's share is its number of turns within its class."""

    classes: tuple[PriorityClass, ...] = ()
    shares: dict[str, int] = field(default_factory=dict)


class Progress(Protocol):
    """A group's progress in one queue: every offset below `floor` is settled, and above it those in `settled`."""

    @property
    def floor(self) -> int: ...

    @property
    def settled(self) -> OffsetRuns: ...

    @property
    def attempts(self) -> dict[int, int]: ...

    @property
    def deaths(self) -> dict[int, int]: ...

    @property
    def interruptions(self) -> dict[int, int]: ...

    @property
    def retry_at(self) -> dict[int, int]: ...

    @property
    def held(self) -> dict[int, Hold]: ...

    @property
    def forgiven(self) -> dict[int, tuple[int, int]]: ...

    def is_settled(self, offset: int) -> bool: ...

    def next_unsettled(self, offset: int) -> int: ...

    def unsettled(self, first: int, end: int) -> list[tuple[int, int]]: ...


class SettleKind(enum.IntEnum):
    """Why an offset is settled."""

    ACK = 0
    FILTERED = 1
    DEAD_LETTER = 2
    CORRUPT = 3
    EXPIRED = 4


@dataclass(frozen=True, slots=True)
class Settlement:
    """A group's settlement of a message, or an attempt that did not settle it."""

    group: str
    kind: SettleKind | None
    """None: an attempt failed, and the message will be delivered again."""
    at_us: int
    """When the settlement was recorded, by the server's clock."""
    attempts: int = 0
    """If an attempt failed: how many attempts there were, including this one."""
    deaths: int = 0
    """If an attempt failed: how many of the attempts ended with a lease that ran out."""
    interruptions: int = 0
    """How often the message was held by a consumer that was told to stop, which counted no attempt."""
    is_held: bool = False
    """Whether this was the last attempt, and the message's key is held since."""

    @classmethod
    def of_attempt(cls, group: str, at_us: int, attempt: Sequence[int]) -> Settlement | None:
        """An attempt as `ProgressStore.attempted` and `hold` take it; None if it only ends a hold."""
        _, attempts, _, deaths, interruptions, held = (*attempt, 0, 0, 0, 0)[:6]
        return None if held < 0 else cls(group, None, at_us, attempts, deaths, interruptions, held > 0)
