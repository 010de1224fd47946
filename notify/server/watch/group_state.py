"""The state of a consumer group that alarms and metrics need, for every queue engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group's state now."""

    name: str
    lags: Mapping[str, int]
    """Messages that are not settled, by topic."""
    is_paused: bool
    consumers: Mapping[str, int]
    """The number of its consumers in each state: `ok`, `slow`, `stuck`, `gone`."""
    seen_us: int
    """When a consumer last asked, settled or renewed, in microseconds since 1970; 0: unknown."""
    dead_letters: int = 0
    """Its dead letters that nobody has sent again."""
    held: int = 0
    """Its held keys."""
    held_since_us: int = 0
    """Since when the key is held that is held the longest, in microseconds since 1970; 0: none is held."""
    held_up: Sequence[str] = ()
    """Its queues, as topic/number, that are read no further because of held keys."""
    oldest_seconds: float | None = None
    """The age of its oldest message that is not settled, in seconds; None if none is, or no objective asks."""
    unread: Sequence[str] = ()
    """Its topics with messages for which no running consumer asks."""
    is_whole: bool = True
    """Whether the lag includes all partitions."""
    blocked: Sequence[str] = ()
    """Its partitions in Kafka, as topic/number, that give nothing because of another program's open transaction."""

    @property
    def lag(self) -> int:
        return sum(self.lags.values())

    @property
    def has_consumer(self) -> bool:
        return any(count for state, count in self.consumers.items() if state != "gone")


class Watched(Protocol):
    """The part of a queue engine that alarms and metrics need. Raises Unavailable while the engine does not answer."""

    async def states(self) -> Sequence[GroupState]:
        """The states of all groups."""
        ...

    async def refused(self) -> list[dict[str, Any]]:
        """Every source whose refused messages were reported, as `GET refused` shows them."""
        ...

    async def sources(self) -> list[dict[str, Any]]:
        """Every source that a bridge or relay writes for, with its epoch, position, `silent_seconds` and so on."""
        ...
