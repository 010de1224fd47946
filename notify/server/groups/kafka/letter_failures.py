"""Failure groups of dead letters over Kafka: each letter is read once, and then counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from notify.protocol.message import DEAD_LETTER_REASON
from notify.server.groups.kafka.letters import Letter
from notify.server.groups.own_letters import failure_row
from notify.server.jobs.failures import Failures

LOOKED_AT = 2_000
"""The most letters that one look reads; the next look continues there."""
MOST_LETTERS = 100_000
"""The most letters of a group that are counted, the oldest first: the place of each open one is held in memory."""
MOST_GROUPS = 100
"""The most groups whose counts are held; the one least recently asked for is dropped."""

Bounds = Mapping[int, tuple[int, int]]
"""(first offset, offset after the last one) of each partition of letters."""


@dataclass(slots=True)
class _GroupCounts:
    """The counts for one group's letters before the number `next`."""

    starts: Mapping[int, int]
    next: int = 0
    looked_at: int = 0
    failures: Failures = field(default_factory=Failures)
    waiting: list[tuple[Letter, str]] = field(default_factory=list)
    """Open letters without their content, each with its reason."""


class LetterFailures:
    """The failure groups of each group's letters. Used by one thread at a time."""

    def __init__(self) -> None:
        self._counts: dict[str, _GroupCounts] = {}

    def look(
        self,
        group: str,
        bounds: Bounds,
        read: Callable[[int], Iterator[Letter]],
        is_closed: Callable[[Letter], bool],
    ) -> dict[str, Any]:
        """The failure groups as the admin route shows them, with the next letters counted.

        `read` yields the letters from a number on; `is_closed` tells whether a letter was redriven or dropped.
        """
        counts = self._counts_of(group, {partition: start for partition, (start, _) in bounds.items()})
        self._close(counts, is_closed)
        most = min(LOOKED_AT, MOST_LETTERS - counts.looked_at)
        came = 0
        for letter in itertools.islice(read(counts.next), max(0, most)):
            came += 1
            self._count(counts, letter, is_closed(letter))
        total = sum(max(0, end - start) for start, end in bounds.values())
        is_all = came < most  # the bounds count transactions' markers too
        return {
            "failures": [failure_row(failure) for failure in counts.failures.listed()],
            "others": counts.failures.others,
            "looked_at": counts.looked_at,
            "of": counts.looked_at if is_all else max(total, counts.looked_at),
        }

    def _counts_of(self, group: str, starts: Mapping[int, int]) -> _GroupCounts:
        """The counts of a group; new ones if letters were purged or partitions added since."""
        counts = self._counts.pop(group, None)
        if counts is None or counts.starts != starts:
            counts = _GroupCounts(starts)
        self._counts[group] = counts
        if len(self._counts) > MOST_GROUPS:
            del self._counts[next(iter(self._counts))]
        return counts

    def _close(self, counts: _GroupCounts, is_closed: Callable[[Letter], bool]) -> None:
        waiting = []
        for letter, reason in counts.waiting:
            if is_closed(letter):
                counts.failures.closed(reason)
            else:
                waiting.append((letter, reason))
        counts.waiting = waiting

    def _count(self, counts: _GroupCounts, letter: Letter, is_closed: bool) -> None:
        payload = letter.payload()
        reason = (payload.headers or {}).get(DEAD_LETTER_REASON, "")
        counts.failures.note(reason, letter.id, payload.topic, letter.dead_us, is_closed=is_closed, may_grow=True)
        counts.next, counts.looked_at = letter.number + 1, counts.looked_at + 1
        if not is_closed:
            counts.waiting.append((letter.place_alone(), reason))
