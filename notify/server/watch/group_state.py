"""A consumer group as alarms and metrics look at it, whoever keeps its queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group now."""

    name: str
    lags: Mapping[str, int]
    """Messages that are not settled, by topic."""
    is_paused: bool
    consumers: Mapping[str, int]
    """The number of its consumers in each state: `ok`, `slow`, `stuck`, `gone`."""
    asked_us: int
    """When one of them asked last, in microseconds since 1970; 0: not known."""

    @property
    def lag(self) -> int:
        return sum(self.lags.values())

    @property
    def has_consumer(self) -> bool:
        return any(count for state, count in self.consumers.items() if state != "gone")
