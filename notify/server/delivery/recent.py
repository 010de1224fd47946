"""Who was handed which message lately, and why attempts failed: in memory, bounded, and never written.

The log has the time of each acknowledgement and failed attempt, not the consumer and not its reason. An acknowledgement
costs a request one tuple here, for all messages that it acknowledges in a queue; failures, which are rarer and are what
people look for, have a ring of their own, so that acknowledgements cannot push them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MOST_RUNS = 20_000
"""Runs of acknowledged offsets that are remembered, of all groups together: about 9 MB."""
MOST_FAILED = 5_000
REASON_CHARACTERS = 300


Held = tuple[int, int, str, int]
"""A lease whose messages were acknowledged: first and last offset of these, its consumer, and when it was handed out.

Plain tuples, on the path of every acknowledgement: a named one costs three times as much.
"""
Acknowledged = tuple[str, str, int, Sequence[tuple[int, int]], Sequence[Held], int]
"""The messages of one queue that a request acknowledged: group, topic, queue, runs of offsets, leases, and when.

A run is its first offset and its count.
"""


class Holder(NamedTuple):
    """Who acknowledged a message."""

    instance: str
    handed_us: int
    """When it was handed out; 0: that is not certain."""


class Failed(NamedTuple):
    """One attempt that failed."""

    group: str
    topic: str
    queue: int
    offset: int
    attempt: int
    """Its number, from 1."""
    instance: str
    handed_us: int
    at_us: int
    reason: str


class Recent:
    """The rings of one server. Times are microseconds since 1970."""

    __slots__ = ("_acknowledged", "_failed", "_runs", "since_us")

    def __init__(self, now_us: int) -> None:
        self.since_us = now_us
        """Acknowledgements since then are remembered."""
        self._acknowledged: deque[Acknowledged] = deque()
        self._runs = 0
        self._failed: deque[Failed] = deque(maxlen=MOST_FAILED)

    def acknowledged(self, done: Acknowledged) -> None:
        """A request acknowledged messages."""
        self._acknowledged.append(done)
        self._runs += len(done[3])
        while self._runs > MOST_RUNS:
            *_, runs, _, at_us = self._acknowledged.popleft()
            self._runs -= len(runs)
            self.since_us = at_us

    def failed(self, failure: Failed) -> None:
        """An attempt failed."""
        self._failed.append(failure)

    def holders_of(self, topic: str, queue: int, offset: int) -> dict[str, Holder]:
        """The consumers that acknowledged a message, by group, where that is remembered and certain.

        The newest of a group: it may be set back and acknowledge a message again. A request settles what one consumer
        has; where it settles messages of several, none is named.
        """
        found: dict[str, Holder | None] = {}
        for group, of_topic, of_queue, runs, held, _ in reversed(self._acknowledged):
            if of_queue != queue or of_topic != topic or group in found:
                continue
            if any(first <= offset < first + count for first, count in runs):
                times = {handed_us for first, last, _, handed_us in held if first <= offset <= last}
                is_certain = len({instance for _, _, instance, _ in held}) == 1
                found[group] = Holder(held[0][2], times.pop() if len(times) == 1 else 0) if is_certain else None
        return {group: holder for group, holder in found.items() if holder is not None}

    def failures_of(self, topic: str, queue: int, offset: int) -> list[Failed]:
        """The failed attempts at one message, of all groups, the oldest first."""
        return [f for f in self._failed if (f.topic, f.queue, f.offset) == (topic, queue, offset)]
