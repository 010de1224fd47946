"""A consumer group as alarms and metrics look at it, whoever keeps its queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group now."""

    name: str
    lags: Mapping[str, int]
    """Messages that are not settled, by topic."""
    is_paused: bool
    consumers: Mapping[str, int]
    """The number of its consumers in each state: `ok`, `slow`, `stuck`, `gone`."""
    seen_us: int
    """When one of them asked, settled or renewed last, in microseconds since 1970; 0: not known."""
    dead_letters: int = 0
    """Its dead letters that nobody has sent again."""
    is_whole: bool = True
    """Whether the lag is known as a whole."""

    @property
    def lag(self) -> int:
        return sum(self.lags.values())

    @property
    def has_consumer(self) -> bool:
        return any(count for state, count in self.consumers.items() if state != "gone")


class Watched(Protocol):
    """A queue engine, as far as alarms and metrics look at it. Raises Unavailable while it does not answer."""

    async def states(self) -> Sequence[GroupState]:
        """Every group."""
        ...

    async def refused(self) -> list[dict[str, Any]]:
        """Every source whose refused messages were spoken of, as `GET refused` shows them."""
        ...

    async def sources(self) -> list[dict[str, Any]]:
        """Every source that a bridge or relay writes for: epoch, position, `silent_seconds` and what else is known."""
        ...
