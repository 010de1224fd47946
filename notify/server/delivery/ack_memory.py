"""Remembers which consumers acknowledged which messages lately, and why attempts failed: in memory only, bounded.

The log has the time of each acknowledgement and failed attempt, but neither the consumer nor the reason. A request adds
one tuple for all messages that it acknowledges in a queue. Failures, which are rarer and which people look for, have a
separate ring, so that acknowledgements cannot push them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MOST_RUNS = 20_000
"""The most runs of acknowledged offsets that are remembered for all groups together: about 9 MB."""
MOST_FAILED = 5_000
REASON_CHARACTERS = 300
TRACE_CHARACTERS = 8_000
"""The most characters of a traceback that are remembered: its end, where the error is."""
MOST_TRACED = 8 << 20
"""The most characters of the tracebacks of all remembered failures together."""


Held = tuple[int, int, str, int]
"""A lease with acknowledged messages: (their first offset, their last offset, the consumer, when it was handed out).

A plain tuple, because every acknowledgement makes one, and a named tuple costs three times as much.
"""
Acknowledged = tuple[str, str, int, Sequence[tuple[int, int]], Sequence[Held], int]
"""The messages of one queue that a request acknowledged: (group, topic, queue, runs of offsets, leases, when).

A run is (first offset, count).
"""


class Holder(NamedTuple):
    """The consumer that acknowledged a message."""

    instance: str
    handed_us: int
    """When the message was handed out; 0 if this is uncertain."""


class Failed(NamedTuple):
    """One attempt that did not settle its message."""

    group: str
    topic: str
    queue: int
    offset: int
    attempt: int
    """Its number, from 1; of an interruption, which counts none, how many attempts there were before it."""
    instance: str
    handed_us: int
    at_us: int
    reason: str
    interruptions: int = 0
    """How often the message was interrupted until then."""
    trace: str = ""
    """The traceback of its error, if its consumer sent one."""


class AckMemory:
    """The rings of one server. Times are microseconds since 1970."""

    __slots__ = ("_acknowledged", "_failed", "_runs", "_traced", "_traceless", "since_us")

    def __init__(self, now_us: int) -> None:
        self.since_us = now_us
        """Acknowledgements since this time are remembered."""
        self._acknowledged: deque[Acknowledged] = deque()
        self._runs = 0
        self._failed: deque[Failed] = deque()
        self._traced = 0
        self._traceless = 0
        """How many of the oldest failures have no traceback any more."""

    def acknowledged(self, acknowledged: Acknowledged) -> None:
        """Remember the messages that a request acknowledged in a queue."""
        self._acknowledged.append(acknowledged)
        self._runs += len(acknowledged[3])
        while self._runs > MOST_RUNS:
            *_, runs, _, at_us = self._acknowledged.popleft()
            self._runs -= len(runs)
            self.since_us = at_us

    def failed(self, failure: Failed) -> None:
        """Remember a failed attempt, and forget the oldest failures and tracebacks beyond the bounds."""
        self._failed.append(failure)
        self._traced += len(failure.trace)
        if len(self._failed) > MOST_FAILED:
            self._traced -= len(self._failed.popleft().trace)
            self._traceless = max(0, self._traceless - 1)
        while self._traced > MOST_TRACED:
            oldest = self._failed[self._traceless]
            self._traced -= len(oldest.trace)
            self._failed[self._traceless] = oldest._replace(trace="")
            self._traceless += 1

    def holders_of(self, topic: str, queue: int, offset: int) -> dict[str, Holder]:
        """The consumers that acknowledged a message, by group, if they are remembered and certain.

        A group that was reset may acknowledge a message again: then the newest consumer counts. A request normally
        settles one consumer's messages; if it settles messages of several, no consumer is named.
        """
        holders: dict[str, Holder | None] = {}
        for group, of_topic, of_queue, runs, held, _ in reversed(self._acknowledged):
            if of_queue != queue or of_topic != topic or group in holders:
                continue
            if any(first <= offset < first + count for first, count in runs):
                times = {handed_us for first, last, _, handed_us in held if first <= offset <= last}
                is_certain = len({instance for _, _, instance, _ in held}) == 1
                holders[group] = Holder(held[0][2], times.pop() if len(times) == 1 else 0) if is_certain else None
        return {group: holder for group, holder in holders.items() if holder is not None}

    def failures_of(self, topic: str, queue: int, offset: int) -> list[Failed]:
        """The failed attempts at one message, of all groups, the oldest first."""
        return [f for f in self._failed if (f.topic, f.queue, f.offset) == (topic, queue, offset)]
